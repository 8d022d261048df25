"""Build the pages as a site that works offline: `make docs` writes it into build/site. Open index.html in a browser."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path

from markdown_it import MarkdownIt

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.6 system-ui, sans-serif; margin: 0; display: flex; }
nav { padding: 2rem 1rem; min-width: 11rem; } nav a { display: block; text-decoration: none; padding: .1rem 0; }
main { max-width: 56rem; padding: 1rem 2rem 6rem; overflow-x: auto; }
table { border-collapse: collapse; } td, th { border: 1px solid #8886; padding: .3rem .6rem; text-align: left; vertical-align: top; }
pre { background: #8882; padding: 1rem; overflow-x: auto; } code { background: #8882; padding: 0 .2rem; } pre code { background: none; }
@media (max-width: 50rem) { body { display: block; } nav a { display: inline-block; margin-right: .7rem; } }
"""


def pages() -> dict[str, Path]:
    """Name of each page of the site, and its source; the index first, then in the order in which the index names them."""
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    named = list(dict.fromkeys(re.findall(r"\]\(([a-z]+)\.md\)", index)))
    return {"index": DOCS / "README.md"} | {name: DOCS / f"{name}.md" for name in named} | {"changes": ROOT / "CHANGELOG.md"}


def with_links(text: str) -> str:
    """Links between pages, as the site has them."""
    text = re.sub(r"\]\((?:docs/)?README\.md", "](index.md", text)
    return re.sub(r"\]\((?:docs/)?([a-z]+)\.md(#[^)]*)?\)", r"](\1.html\2)", text)


def page(name: str, source: Path, menu: str) -> str:
    text = source.read_text(encoding="utf-8")
    title = html.escape(re.sub(r"^# ", "", text.splitlines()[0]))
    body = MarkdownIt("commonmark").enable("table").render(with_links(text))
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    return f"{head}<style>{STYLE}</style><nav>{menu}</nav><main>{body}</main></html>\n"


def build(target: Path) -> list[Path]:
    """Write the site; the files that were written."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    menu = "".join(f'<a href="{name}.html">{"Shoal" if name == "index" else name}</a>' for name in pages())
    written = []
    for name, source in pages().items():
        written.append(target / f"{name}.html")
        written[-1].write_text(page(name, source, menu), encoding="utf-8")
    if (DOCS / "pictures").is_dir():
        shutil.copytree(DOCS / "pictures", target / "pictures")
    return written


if __name__ == "__main__":
    made = build(ROOT / "build" / "site")
    print(f"{len(made)} pages in {made[0].parent.relative_to(ROOT)}: open {made[0].relative_to(ROOT)}")
