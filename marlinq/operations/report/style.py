"""The style sheet of the page: two sets of colours, of which the reader's system chooses one."""

from __future__ import annotations

_LIGHT = {
    "page": "#f6f7f9", "card": "#ffffff", "text": "#1b1f24", "faint": "#646d78", "rule": "#dfe3e8",
    "accent": "#1f6feb", "warn": "#9a5b00", "hatch": "#d5dae0",
    "s0": "#eef4fb", "s1": "#d6e6f5", "s2": "#b9d5ee", "s3": "#93bfe4", "s4": "#6aa5d8",
    "s5": "#4488c5", "s6": "#2a69a8", "s7": "#184c84", "s8": "#0b2f5b",
    "d0": "#1b5e9e", "d1": "#4d8bc2", "d2": "#8bb6da", "d3": "#c5dbee", "d4": "#f0f0ee",
    "d5": "#f9d9bd", "d6": "#efae7b", "d7": "#d97b3a", "d8": "#a94c10",
    "p0": "#2f77bb", "p1": "#e08a3c", "p2": "#4e9a63", "p3": "#9a6fb8", "p4": "#c9586b",
    "p5": "#6c7a89", "p6": "#b59a2d", "p7": "#3aa3a0",
}  # fmt: skip
_DARK = {
    "page": "#0f1318", "card": "#171c23", "text": "#e3e8ee", "faint": "#93a0ae", "rule": "#2b333d",
    "accent": "#6cb0ff", "warn": "#f0b35a", "hatch": "#3a434f",
    "s0": "#16293f", "s1": "#1b3a5b", "s2": "#214d78", "s3": "#296296", "s4": "#367ab4",
    "s5": "#5395cc", "s6": "#7db1df", "s7": "#aed0ee", "s8": "#e4f1fc",
    "d0": "#7fc0ff", "d1": "#5097d6", "d2": "#356fa3", "d3": "#274a6b", "d4": "#2d333b",
    "d5": "#5e4330", "d6": "#94602f", "d7": "#cf8540", "d8": "#ffb36b",
    "p0": "#5b9fe0", "p1": "#f0a35e", "p2": "#6fbd86", "p3": "#bb93d6", "p4": "#e37d8e",
    "p5": "#93a0ae", "p6": "#d4b94a", "p7": "#5cc4c0",
}  # fmt: skip

_RULES = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 2px}
h3{font-size:14px;margin:0 0 4px;overflow-wrap:anywhere}
p{margin:0 0 10px}
.faint,.sub,figcaption{color:var(--faint)}
.sub{margin:4px 0 20px}
.warn{color:var(--warn)}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;
padding:18px 20px;margin:16px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;margin:0}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 14px}
.tile b{display:block;font-size:21px;line-height:1.3;font-weight:600}
.tile span{color:var(--faint);font-size:13px}
.scroll{overflow-x:auto}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(212px,1fr));gap:18px 22px;margin-top:12px}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(440px,1fr));gap:18px 26px}
figure{margin:0;min-width:0}
figcaption{font-size:12.5px}
svg{display:block;max-width:none}
.grid svg{width:100%;height:auto}
.stack{width:100%;height:20px;border-radius:4px}
table{border-collapse:collapse;width:100%;font-size:14px}
th{text-align:left;font-weight:500;color:var(--faint);white-space:nowrap}
th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
tr:last-child>td,tr:last-child>th{border-bottom:0}
td{overflow-wrap:anywhere}
td.n,th.n{text-align:right;white-space:nowrap}
td.m{width:120px}td.w{white-space:nowrap}
tr.other td{color:var(--accent)}
ul.parts{list-style:none;display:flex;flex-wrap:wrap;gap:4px 22px;padding:0;margin:10px 0 0;font-size:14px}
.legend{display:flex;align-items:center;gap:2px;font-size:12.5px;color:var(--faint);margin:8px 0 0}
.legend span:first-child{margin-right:8px}.legend span:last-child{margin-left:8px}
.legend span:not(.box):not(:first-child):not(:last-child){margin:0 6px}
.box{display:inline-block;width:18px;height:12px;border-radius:2px}
.parts .box{width:11px;height:11px}
details{margin-top:10px}summary{cursor:pointer;color:var(--faint)}
.meter{display:inline-block;height:9px;border-radius:2px;background:var(--s5);margin-right:8px}
text.label{font-size:11.5px;fill:var(--text)}text.faint{fill:var(--faint)}
text.end{text-anchor:end}text.middle{text-anchor:middle;fill:var(--faint)}
.bar{fill:var(--p0)}.axis{stroke:var(--rule)}.unknown{fill:var(--hatch)}
.band{fill:var(--p0);opacity:.22}.line{fill:none;stroke:var(--p0);stroke-width:1.8}
footer{color:var(--faint);font-size:13px;margin-top:22px}
@media print{section{break-inside:avoid}}
"""


def style_rules() -> str:
    """All rules, the dark colours inside ``prefers-color-scheme``."""
    classes = "".join(
        f".{name}{{fill:var(--{name})}}.box.{name}{{background:var(--{name})}}"
        for name in _LIGHT
        if name[0] in "sdp" and name[1:].isdigit()
    )
    dark = f"@media (prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
    return f":root{{color-scheme:light dark;{_variables(_LIGHT)}}}{dark}{_RULES}{classes}"


def _variables(colours: dict[str, str]) -> str:
    return ";".join(f"--{name}:{value}" for name, value in colours.items())
