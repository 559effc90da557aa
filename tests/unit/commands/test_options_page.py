"""docs/reference/options.md says what the fields say."""

from pathlib import Path

from mpillm.options.fields import FIELDS
from tools.options_page import options_page

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "options.md"


def test_page_is_made_from_the_fields() -> None:
    assert PAGE.read_text() == options_page(), "run `make docs`"


def test_every_field_is_on_the_page() -> None:
    page = PAGE.read_text()
    assert all(f"`--{field.name}`" in page for field in FIELDS)
