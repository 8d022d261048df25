"""Write the pages that are made from the schema and the dialect tables, and put the example plugins into their page."""

import re
from pathlib import Path

from shoal.config.reference import dialects_page, settings_page

HERE = Path(__file__).parent


def with_examples(page: str) -> str:
    """A page with each file that it names in a comment below that comment."""

    def block(found: re.Match[str]) -> str:
        text = (HERE.parent / found["file"]).read_text(encoding="utf-8")
        return f"<!-- {found['file']} -->\n```python\n{text}```\n"

    return re.sub(r"<!-- (?P<file>examples/\S+) -->\n(```python\n.*?```\n)?", block, page, flags=re.DOTALL)


if __name__ == "__main__":
    (HERE / "dialects.md").write_text(dialects_page(), encoding="utf-8")
    (HERE / "settings.md").write_text(settings_page(), encoding="utf-8")
    extending = HERE / "extending.md"
    extending.write_text(with_examples(extending.read_text(encoding="utf-8")), encoding="utf-8")
