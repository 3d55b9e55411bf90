"""The report of a simulated sweep in which servers fail in every way there is, in a real browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from analysis.figures import FIGURES
from analysis.report import write_report
from bench.outcome import OutcomeKind
from tests.analysis import chromium
from tests.faults.sweeps import Sweep, cleaned_up

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(chromium.binary() is None, reason="no chromium here (Debian: apt-get install chromium)"),
]

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
# Figures that this sweep has the data for; the others have to say why they are not drawn. At hundreds of times a card's
# pace a busy host reads a whole reply at once, which leaves no time per token and no "pareto".
DRAWN = {"throughput", "latency", "progress", "failures", "memory", "timeline"}
MAY_BE_DRAWN = {"pareto"}
NOT_DRAWN = {"Why: acceptance length and step time", "What mattered", "Forecast against actual"}
FIGURES_OF_PAGE = """[...document.querySelectorAll('figure')].map(figure => {
    const svg = figure.querySelector('svg');
    return {name: figure.id, height: svg.getBoundingClientRect().height, width: svg.getBoundingClientRect().width,
        paths: svg.querySelectorAll('path, use').length, texts: svg.querySelectorAll('text').length};
})"""
# Pairs of texts of one figure that lie upon each other by more than a sixth of the smaller one.
OVERLAPS = """[...document.querySelectorAll('figure')].flatMap(figure => {
    const texts = [...figure.querySelectorAll('svg text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    return texts.flatMap(([one, a], i) => texts.slice(i + 1).filter(([, b]) => {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        return wide > 0 && high > 0 && wide * high > Math.min(a.width * a.height, b.width * b.height) / 6;
    }).map(([other]) => `${figure.id}: ${one} / ${other}`));
})"""


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    with cleaned_up(Sweep(tmp_path_factory.mktemp("results"), experiment="gallery")) as swept:
        yield swept.finish(swept.command())


@pytest.fixture
def shots(request: pytest.FixtureRequest) -> Path:
    """Where screenshots stay (docs/production.md): SWEEP_SCREENSHOTS, else pytest's cache."""
    cache = request.config.cache
    assert cache is not None
    folder = Path(os.environ.get("SWEEP_SCREENSHOTS") or cache.mkdir("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_the_sweep_holds_every_kind_of_failure_of_a_server(gallery: Sweep) -> None:
    assert gallery.code == 0, gallery.output
    kinds = {record.outcome.kind for record in gallery.trials}
    failures = {"crashed", "infeasible", "hung", "unhealthy", "mismatched"}
    assert {OutcomeKind(name) for name in failures} <= kinds, gallery.output


@pytest.mark.parametrize(("label", "size"), [("desktop", DESKTOP), ("phone", PHONE)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_opens_without_errors_or_requests_and_every_figure_is_drawn(
    label: str, size: dict[str, int], scheme: str, gallery: Sweep, shots: Path
) -> None:
    address = write_report(gallery.folder.path).as_uri()
    picture = shots / f"gallery-{label}-{scheme}.png"
    picture.unlink(missing_ok=True)
    async with chromium.browser() as session, chromium.page(session) as page:
        await page.open(address, dark=scheme == "dark", **size)
        await page.screenshot(picture)
        assert page.errors == []
        assert [asked for asked in page.requests if asked != address and not asked.startswith("data:")] == []
        drawn = await page.evaluate(FIGURES_OF_PAGE)
        names = {figure["name"] for figure in drawn}
        assert DRAWN <= names <= DRAWN | MAY_BE_DRAWN
        for figure in drawn:
            assert figure["height"] > 60, figure
            assert figure["paths"] > 4, figure
            assert figure["texts"] > 4, figure
            assert figure["width"] <= size["width"], figure
        said = await page.evaluate("[...document.querySelectorAll('.quiet li')].map(item => item.textContent)")
        assert len(drawn) + len(said) == len(FIGURES)
        assert all(any(text.startswith(f"{title}: ") for text in said) for title in NOT_DRAWN), said
        assert await page.evaluate(OVERLAPS) == []
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
        assert "simulated" in await page.evaluate("document.title")
        assert "simulated" in await page.evaluate("document.querySelector('h1').textContent")
    assert picture.stat().st_size > 100_000


async def test_its_trials_sort_and_filter_with_their_failures(gallery: Sweep) -> None:
    address = write_report(gallery.folder.path).as_uri()
    cells = "[...document.querySelectorAll('#trials-table tbody tr')].filter(row => !row.hidden)"
    async with chromium.browser() as session, chromium.page(session) as page:
        await page.open(address, **DESKTOP)
        click = "document.querySelectorAll('#trials-table th button')[3].click()"
        for reverse in (True, False):
            await page.evaluate(click)
            values = await page.evaluate(f"{cells}.map(row => row.cells[3].dataset.value)")
            numbers = [float(value) for value in values if value]
            assert len(numbers) > 2
            assert numbers == sorted(numbers, reverse=reverse)
            assert set(values[len(numbers) :]) == {""}, "failures do not come last"
        await page.evaluate(
            "{ const kind = document.getElementById('filter-kind'); kind.value = 'hung';"
            " kind.dispatchEvent(new Event('change')); }"
        )
        hung = await page.evaluate(f"{cells}.map(row => row.cells[8].textContent)")
        assert len(hung) == 3
        assert any("watchdog timeout" in text for text in hung)
