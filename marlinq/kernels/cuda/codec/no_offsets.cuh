// Empty type in place of zero points, for elements that have none.
#pragma once

struct NoOffsets {};
