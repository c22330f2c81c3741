"""Faults planted at named places of a kernel's sources.

A source marks such a place by ``FAULT_SITE(name, text)``, a macro that expands to ``text``. The emulation can
define the macro so that a wrong text replaces one site's; the source stays as it is. A test then asks whether
the emulation reports the fault.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

# FAULT_SITE_PICK gets PLANTED_<site> and the site's own text. For the planted site, PLANTED_<site> is two
# arguments, so the second is the wrong text; for every other site it is one. Both texts are in parentheses.
_PICK = """\
#define FAULT_SITE_SECOND(first, second, ...) second
#define FAULT_SITE_PICK(...) FAULT_SITE_SECOND(__VA_ARGS__, )
#define FAULT_SITE_OPEN(...) __VA_ARGS__
#define FAULT_SITE_TEXT(parenthesised) FAULT_SITE_OPEN parenthesised
#define FAULT_SITE(name, ...) FAULT_SITE_TEXT(FAULT_SITE_PICK(PLANTED_##name, (__VA_ARGS__)))
"""
_SITE = re.compile(r"\bFAULT_SITE\((\w+),")


class UnknownSite(LookupError):
    """A kernel's sources have no fault site of this name."""


@dataclass(frozen=True)
class Planted:
    """A fault: a wrong text in the place of a fault site's.

    Attributes:
        site: name of the fault site.
        wrong: C++ text that replaces the site's own; empty to leave it out.
    """

    site: str
    wrong: str = ""

    def definitions(self) -> str:
        """Lines that the preprocessor has to read before the sources."""
        wrong = " ".join(self.wrong.split())
        return f"{_PICK}#define PLANTED_{self.site} ~, ({wrong})\n"


def sites(sources: Path) -> dict[str, str]:
    """The fault sites below a folder: the file's path relative to it, by the site's name.

    Raises:
        ValueError: two sites have the same name.
    """
    found: dict[str, str] = {}
    for path in sorted(sources.rglob("*.cuh")):
        lines = path.read_text(encoding="utf-8").splitlines()
        code = "\n".join(line for line in lines if not line.lstrip().startswith(("//", "#")))
        for name in _SITE.findall(code):
            file = path.relative_to(sources).as_posix()
            if name in found:
                raise ValueError(f"the fault site {name} is in {found[name]} and in {file}")
            found[name] = file
    return found
