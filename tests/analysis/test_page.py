"""The report in a real browser, as a reader has it before them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from analysis.figures import FIGURES
from analysis.report import write_report
from tests.analysis import chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.binary() is None, reason="no chromium here (Debian: apt-get install chromium)"),
]

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
COLUMN = """(column) => [...document.querySelectorAll('#trials-table tbody tr')]
    .filter(row => !row.hidden).map(row => row.cells[column].dataset.value ?? row.cells[column].textContent)"""
HEADS = "[...document.querySelectorAll('#trials-table th')].map(head => head.textContent)"


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with chromium.browser() as opened:
        yield opened


@pytest.fixture
def shots(tmp_path: Path) -> Path:
    """Where screenshots stay: SWEEP_SCREENSHOTS, else the test's own folder."""
    folder = Path(os.environ.get("SWEEP_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.mark.parametrize("name", ["finished", "running", "failed", "single", "committed"])
@pytest.mark.parametrize(("label", "size"), [("desktop", DESKTOP), ("phone", PHONE)])
async def test_the_page_opens_without_errors_or_requests(
    name: str,
    label: str,
    size: dict[str, int],
    request: pytest.FixtureRequest,
    session: aiohttp.ClientSession,
    shots: Path,
) -> None:
    address = write_report(request.getfixturevalue(name)).as_uri()
    for dark in (False, True):
        async with chromium.page(session) as page:
            await page.open(address, dark=dark, **size)
            await page.screenshot(shots / f"{name}-{label}-{'dark' if dark else 'light'}.png")
            assert page.errors == []
            assert [asked for asked in page.requests if asked != address and not asked.startswith("data:")] == []
            assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"


async def test_every_figure_is_drawn_and_its_text_can_be_selected(
    finished: Path, session: aiohttp.ClientSession
) -> None:
    async with chromium.page(session) as page:
        await page.open(write_report(finished).as_uri(), **DESKTOP)
        drawn = await page.evaluate(
            "[...document.querySelectorAll('figure svg')].map(svg => ({height: svg.getBoundingClientRect().height,"
            " paths: svg.querySelectorAll('path, use').length, texts: svg.querySelectorAll('text').length}))"
        )
        assert len(drawn) == len(FIGURES)
        assert all(figure["height"] > 100 and figure["paths"] > 4 and figure["texts"] > 4 for figure in drawn)


async def test_text_and_background_change_with_the_scheme(finished: Path, session: aiohttp.ClientSession) -> None:
    address = write_report(finished).as_uri()
    colours = []
    for dark in (False, True):
        async with chromium.page(session) as page:
            await page.open(address, dark=dark, **DESKTOP)
            colours.append(
                await page.evaluate(
                    "[getComputedStyle(document.body).backgroundColor,"
                    " getComputedStyle(document.querySelector('figure svg text')).fill]"
                )
            )
    (light_paper, light_ink), (dark_paper, dark_ink) = ([brightness(colour) for colour in pair] for pair in colours)
    assert light_paper > 200 > 100 > light_ink
    assert dark_paper < 60 < 150 < dark_ink


def brightness(colour: str) -> float:
    red, green, blue = (float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")[:3])
    return (red + green + blue) / 3


async def test_a_click_on_a_head_sorts_by_number_and_leaves_what_is_missing_at_the_end(
    finished: Path, session: aiohttp.ClientSession
) -> None:
    async with chromium.page(session) as page:
        await page.open(write_report(finished).as_uri(), **DESKTOP)
        heads: list[str] = await page.evaluate(HEADS)
        column = heads.index("output tokens/s")
        for reverse in (True, False):
            await page.evaluate(f"document.querySelectorAll('#trials-table th button')[{column}].click()")
            values = await column_of(page, column)
            numbers = [float(value) for value in values if value]
            assert numbers == sorted(numbers, reverse=reverse)
            assert values[len(numbers) :] == [""] * (len(values) - len(numbers))
        state = await page.evaluate(
            f"document.querySelectorAll('#trials-table th')[{column}].getAttribute('aria-sort')"
        )
        assert state == "ascending"


async def test_the_table_can_be_filtered_by_the_way_trials_ended(
    finished: Path, session: aiohttp.ClientSession
) -> None:
    async with chromium.page(session) as page:
        await page.open(write_report(finished).as_uri(), **DESKTOP)
        await choose(page, "filter-kind", "infeasible")
        assert set(await column_of(page, 2)) == {"out of memory"}
        await choose(page, "filter-kind", "")
        assert len(await column_of(page, 2)) == 46


async def test_a_phone_sorts_by_choosing(finished: Path, session: aiohttp.ClientSession) -> None:
    async with chromium.page(session) as page:
        await page.open(write_report(finished).as_uri(), **PHONE)
        heads: list[str] = await page.evaluate(HEADS)
        column = heads.index("wall time")
        await choose(page, "sort-by", str(column))
        values = [float(value) for value in await column_of(page, column)]
        assert values == sorted(values, reverse=True)
        smallest = await page.evaluate(
            "Math.min(...[...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect().height))"
        )
        assert smallest > 7, "text of figures cannot be read on a phone"


async def test_it_can_be_printed(finished: Path, session: aiohttp.ClientSession, shots: Path) -> None:
    async with chromium.page(session) as page:
        await page.open(write_report(finished).as_uri(), dark=True, **DESKTOP)
        await page.pdf(shots / "finished.pdf")
    assert (shots / "finished.pdf").stat().st_size > 50_000


async def column_of(page: chromium.Page, column: int) -> list[str]:
    values: list[str] = await page.evaluate(f"({COLUMN})({column})")
    return values


async def choose(page: chromium.Page, select: str, value: Any) -> None:
    await page.evaluate(
        f"{{ const chosen = document.getElementById('{select}'); chosen.value = '{value}';"
        " chosen.dispatchEvent(new Event('change')); }"
    )
