"""`python -m docs.generators`: write all generated pages."""

import sys

from docs.generators.pages import PAGES, ROOT

for name, write in PAGES.items():
    path = ROOT / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(write(), encoding="utf-8")
    sys.stdout.write(f"{path.relative_to(ROOT.parent)}\n")
