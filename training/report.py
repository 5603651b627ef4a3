"""An evaluation for people: a table, a plot, and JSON for programs."""

import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from adaflash.training.evaluate import Evaluation

ALL = "all"
WIDTH, HEIGHT, MARGIN = 720, 400, 50  # of the plot, in pixels
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")

Evaluations = Mapping[float, Evaluation]  # by temperature


def print_table(found: Evaluations, console: Console) -> None:
    num_places = max(
        len(figures.right) for each in found.values() for figures in each.domains.values()
    )
    table = Table(title="accepted length, and how often a draft is right if all before it were")
    for name in ("temperature", "domain", "texts", "length", *map(str, range(1, num_places + 1))):
        table.add_column(name, justify="left" if name == "domain" else "right", no_wrap=True)
    for temperature, each in sorted(found.items()):
        for domain, figures in [*sorted(each.domains.items()), (ALL, each.together)]:
            chances = [f"{chance:.2f}" for chance in figures.conditional()]
            row = (f"{temperature:g}", domain, f"{figures.num_texts}")
            table.add_row(*row, f"{figures.accepted_length:.2f}", *chances)
    console.print(table)
    for temperature, each in sorted(found.items()):
        error = each.calibration_error
        console.print(f"calibration error of survival at {temperature:g}: {error:.1%}")


def write_json(found: Evaluations, path: Path) -> None:
    content = {f"{temperature:g}": each.as_json() for temperature, each in sorted(found.items())}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_plot(found: Evaluations, path: Path) -> None:
    """An SVG: the chance that the first k drafts survive, a line for each domain at temperature 0.

    Sampled texts are drawn dashed.
    """
    lines = [
        (f"{domain}, {temperature:g}", temperature > 0, figures.survival())
        for temperature, each in sorted(found.items())
        for domain, figures in sorted(each.domains.items())
    ]
    num_places = max(len(survival) for _, _, survival in lines)
    parts = [_axes(num_places)]
    for number, (label, dashed, survival) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(
            f"{_x(place, num_places):.1f},{_y(chance):.1f}"
            for place, chance in enumerate((1.0, *survival))
        )
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
            f'<text x="{WIDTH - 150}" y="{MARGIN + 16 * number}" fill="{colour}">{label}</text>'
        )
    body = "\n".join(parts)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n',
        encoding="utf-8",
    )


def _axes(num_places: int) -> str:
    marks = [
        f'<text x="{_x(place, num_places):.1f}" y="{HEIGHT - MARGIN + 18}" '
        f'text-anchor="middle">{place}</text>'
        for place in range(num_places + 1)
    ]
    marks += [
        f'<line x1="{MARGIN}" x2="{_x(num_places, num_places):.1f}" y1="{_y(share):.1f}" '
        f'y2="{_y(share):.1f}" stroke="#ddd"/><text x="{MARGIN - 8}" y="{_y(share) + 4:.1f}" '
        f'text-anchor="end">{share:g}</text>'
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    title = f'<text x="{MARGIN}" y="24">chance that the first k drafts are all accepted</text>'
    return "\n".join([title, *marks])


def _x(place: int, num_places: int) -> float:
    return MARGIN + (WIDTH - MARGIN - 170) * place / num_places


def _y(share: float) -> float:
    return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * share
