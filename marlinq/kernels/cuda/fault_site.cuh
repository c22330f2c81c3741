// FAULT_SITE(name, text) is `text`, and costs nothing. The emulation's tests (tests/emulation) define the macro otherwise: there, a
// wrong text takes the place of one site's, and the emulation has to report it. A site's name is unique.
#pragma once
#ifndef FAULT_SITE
#define FAULT_SITE(name, ...) __VA_ARGS__
#endif
