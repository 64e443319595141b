"""How a report looks: one style sheet for light and dark, desk and phone."""

from __future__ import annotations

from shardwise.planner.search.picture import COLOURS

STYLE = (
    """
:root{--ground:#f6f7f9;--card:#fff;--ink:#1c2024;--soft:#5f6772;--rule:#e3e6ea;--accent:ACCENT;--alarm:ALARM}
@media(prefers-color-scheme:dark){
:root{--ground:#111318;--card:#191c22;--ink:#e8eaed;--soft:#9aa3af;--rule:#2c313a;--accent:#7ea6d3}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif;
-webkit-text-size-adjust:100%;overflow-wrap:anywhere}
main{max-width:980px;margin:0 auto;padding:40px 24px 56px}
h1{font-size:1.75rem;line-height:1.2;letter-spacing:-.01em;margin:0 0 16px;text-wrap:balance}
h2{font-size:1.15rem;line-height:1.3;margin:0 0 8px}
p{margin:0 0 10px}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--ground);
border:1px solid var(--rule);border-radius:4px;padding:0 .3em}
section,.verdict{background:var(--card);border:1px solid var(--rule);border-radius:12px;padding:22px 24px;
margin:0 0 20px}
.verdict{font-size:1.15rem;line-height:1.45;font-weight:500;border-left:5px solid var(--accent)}
.soft{color:var(--soft)}
figure{margin:20px 0 0}
figcaption{font-weight:600;font-size:.95rem;margin:0 0 6px}
svg{display:block;width:100%;height:auto}
svg.narrow{display:none}
.many{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,20rem),1fr));gap:0 28px}
.many svg.narrow{display:block}
svg text{font-size:12px;fill:var(--ink);font-variant-numeric:tabular-nums}
svg text.soft{fill:var(--soft)}
svg text.end{text-anchor:end}
svg text.middle{text-anchor:middle}
svg text.total{font-weight:600}
svg text.on-dark{fill:#fff}
svg text.on-light{fill:#1c2024}
.grid{stroke:var(--rule);fill:none}
.axis{stroke:var(--soft);fill:none}
.line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.lead{fill:none;stroke-width:1;opacity:.6}
.mark{stroke:var(--card);stroke-width:1.2}
.part{stroke:var(--card)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:0 0 10px;padding:0;font-size:.85rem;
color:var(--soft)}
.legend i{display:inline-block;width:16px;border-top:3px solid var(--key);border-radius:2px;vertical-align:middle;
margin-right:6px}
.legend i.dashed{border-top-style:dashed;border-top-width:2px;border-radius:0}
.legend i.block{width:11px;height:11px;border:0;background:var(--key);vertical-align:-1px}
.box{overflow:auto;max-height:36rem;margin:16px 0 0;border:1px solid var(--rule);border-radius:8px}
.box:focus-visible{outline:2px solid var(--accent)}
table{border-collapse:collapse;width:100%;font-size:.875rem;font-variant-numeric:tabular-nums}
th,td{padding:7px 12px;text-align:left;border-bottom:1px solid var(--rule);white-space:nowrap;vertical-align:top}
tbody tr:last-child>*{border-bottom:0}
thead th{color:var(--soft);font-weight:600;font-size:.8rem;background:var(--ground);position:sticky;top:0}
.number{text-align:right}
.box:has(.heat){border:0;margin:8px 0 0}
.heat{width:auto;min-width:min(100%,24rem);border-collapse:separate;border-spacing:2px}
.heat th,.heat td{border:0;text-align:center;padding:8px 10px}
.heat th{background:none;color:var(--soft);font-weight:600;font-size:.8rem}
.heat thead th{position:static}
.heat tbody th{text-align:right;position:sticky;left:0;background:var(--card)}
.heat td{border-radius:4px;min-width:3.4rem;background:color-mix(in srgb,COLOUR var(--share,0%),var(--ground))}
.heat td.deep{color:#fff}
.heat td.none{background:none}
.heat td.marked{outline:2.5px solid var(--alarm);outline-offset:-1px;font-weight:700}
dl{display:grid;grid-template-columns:max-content 1fr;gap:4px 16px;margin:0;font-size:.9rem}
dt{color:var(--soft)}
dd{margin:0}
.method{margin:0;padding-left:1.1em;font-size:.9rem}
.method li{margin:0 0 6px}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:0 20px;align-items:start}
@media(max-width:640px){
main{padding:20px 12px 32px}
h1{font-size:1.4rem}
section,.verdict{padding:16px 14px;margin:0 0 14px;border-radius:10px}
.verdict{font-size:1.05rem}
svg.wide{display:none}
svg.narrow{display:block}
th,td{padding:6px 9px}
.heat th,.heat td{padding:6px 5px;min-width:2.8rem}
dl{grid-template-columns:1fr;gap:0}
dd{margin:0 0 8px}}
@media print{.box{max-height:none}body{background:#fff}section,.verdict{break-inside:avoid}}
""".replace("ACCENT", COLOURS[0])
    .replace("ALARM", COLOURS[3])
    .replace("COLOUR", COLOURS[0])
)
"""Colours are those of plan's pictures; a phone shows the pictures that were drawn for its width."""
