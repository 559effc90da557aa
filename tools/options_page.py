"""``make docs``: write docs/reference/options.md from the fields."""

from __future__ import annotations

from mpillm.options.fields import FIELDS


def options_page() -> str:
    """Return the text of docs/reference/options.md."""
    lines = [
        "# Options",
        "",
        "Made by `make docs` from `mpillm/options/fields/`. Underscores and hyphens are alike: `--log_dir`,"
        " `--log-dir`; upper and lower case",
        "are alike in words to choose from. The commands of one test take the same options: each uses those"
        " of its stages.",
        "A duration takes a unit: 90s, 10min, 1.5h, 600000ms; a bare number is seconds.",
    ]
    group = ""
    for field in FIELDS:
        if field.group != group:
            group = field.group
            lines += ["", f"## {group.capitalize()}", "", "| option | meaning | default |", "|---|---|---|"]
        also = "".join(f", `--{alias}`" for alias in field.aliases)
        meaning = (field.description + (f" ({', '.join(field.choices)})" if field.choices else "")).replace(
            "|", "&#124;"
        )
        default = f"`{field.default_text}`" if field.default_text else ""
        lines.append(f"| `--{field.name}`{also} | {meaning} | {default} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(options_page(), end="")
