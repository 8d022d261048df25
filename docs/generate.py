"""Write the pages that are made from the schema and the dialect tables."""

from pathlib import Path

from shoal.config.reference import dialects_page, settings_page

HERE = Path(__file__).parent
(HERE / "dialects.md").write_text(dialects_page(), encoding="utf-8")
(HERE / "settings.md").write_text(settings_page(), encoding="utf-8")
