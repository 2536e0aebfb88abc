"""The page of a merged trace, in a real browser: what it draws, says and lets one do."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.unit.trace_runs import made_run
from zero_bubble.builders import build
from zero_bubble.schedule import Kind, Pass
from zero_bubble.trace.idle import Cause, measured_gaps
from zero_bubble.trace.measured import Measured
from zero_bubble.trace.merge import load_traces, merge
from zero_bubble.trace.page import page, save_page
from zero_bubble.trace.rank_file import load_rank, rank_file, save_rank

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium"
)


@dataclass
class Opened:
    """A page in the browser, and what it was made of."""

    page: Page
    directory: Path
    measured: tuple[Measured, ...]
    complaints: list[str]
    """Console errors and exceptions."""
    requests: list[str]

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()

    def figure(self, name: str) -> str:
        return self.page.locator(f'#tip dd[data-figure="{name}"]').first.inner_text()

    def ms(self, name: str) -> float:
        match = re.match(r"[-\d.]+(?= ms)", self.figure(name))
        assert match is not None
        return float(match[0])

    def reset(self) -> None:
        self.page.keyboard.press("0")
        self.page.wait_for_function("state.view.end === whole().end && !state.isDue")

    def redrawn(self) -> None:
        self.page.wait_for_function("!state.isDue")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser: Browser, directory: Path, name: str, stages: int, size: int) -> Opened:
    schedule = build(name, stages, size)
    ranks = made_run(schedule, iterations=(10, 11)) + made_run(schedule, first_rank=50, seed=1)
    for one in ranks if size < 50 else ranks[:stages]:
        save_rank(one, directory)
    measured = load_traces(directory).measured
    save_page(measured, directory / "page.html")
    # Without the page's own policy: it must not hide that something asks for the network.
    tab = browser.new_page(viewport={"width": 1400, "height": 1000}, bypass_csp=True)
    found = Opened(tab, directory, measured, [], [])
    found.page.on(
        "console", lambda message: found.complaints.append(f"{message.type}: {message.text}")
    )
    found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
    found.page.on("request", lambda request: found.requests.append(request.url))
    found.page.goto((directory / "page.html").as_uri())
    found.page.wait_for_selector("#chart .track")
    return found


@pytest.fixture(scope="module", params=["zb-h1", "zb-v"])
def run(
    request: pytest.FixtureRequest, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Opened:
    """Four stages and eight microbatches; two iterations of one pipeline, one of another."""
    return opened(browser, tmp_path_factory.mktemp(request.param), request.param, 4, 8)


@pytest.mark.parametrize("panel", ["predicted", "measured"])
def test_every_pass_is_drawn_once(run: Opened, panel: str) -> None:
    run.reset()
    drawn = run.page.eval_on_selector_all(
        f"[data-panel={panel}] rect.pass",
        "all => all.map(one => [one.classList[1], one.dataset.stage, one.dataset.chunk,"
        " one.dataset.microbatch])",
    )
    schedule = run.measured[0].schedule
    assert Counter(map(tuple, drawn)) == Counter(
        (str(one.kind), str(stage), str(one.chunk), str(one.microbatch))
        for stage, row in enumerate(schedule.passes)
        for one in row
    )


@pytest.mark.parametrize(("stage", "what"), [(0, Pass(Kind.B, 3)), (2, Pass(Kind.W, 7))])
def test_hovering_shows_the_times_of_the_file(run: Opened, stage: int, what: Pass) -> None:
    run.reset()
    ranks = [load_rank(rank_file(run.directory, rank)) for rank in range(4)]
    offsets = [one.clock_offset_ms for one in ranks]
    first = min(
        one.iterations[0].passes[0].begin + offset
        for one, offset in zip(ranks, offsets, strict=True)
    )
    (expected,) = [one for one in ranks[stage].iterations[0].passes if one.what == what]
    selector = (
        f"rect.pass.{what.kind}[data-stage='{stage}'][data-chunk='0']"
        f"[data-microbatch='{what.microbatch}']"
    )
    run.page.locator(f"[data-panel=measured] {selector}").hover()
    assert run.page.locator("#tip strong").inner_text() == f"{what.kind} {what.microbatch} c0"
    assert run.figure("stage") == f"{stage} (rank {stage})"
    shift = offsets[stage] - first
    assert run.ms("start") == pytest.approx(expected.ready + shift, abs=0.006)
    assert run.ms("end") == pytest.approx(expected.end + shift, abs=0.006)
    assert run.ms("duration") == pytest.approx(expected.end - expected.ready, abs=0.001)
    assert run.ms("waited") == pytest.approx(expected.ready - expected.begin, abs=0.006)
    run.page.locator(f"[data-panel=predicted] {selector}").hover()
    spans = run.measured[0].predict().spans[stage]
    (span,) = [one for one in spans if one.what == what]
    begin = min(row[0].ready for row in run.measured[0].rows)
    assert run.ms("start") == pytest.approx(span.start + begin, abs=0.006)
    assert run.ms("end") == pytest.approx(span.end + begin, abs=0.006)


def test_the_table_says_what_the_trace_says(run: Opened) -> None:
    measured = run.measured[0]
    rates = run.page.eval_on_selector_all(
        "#table .rate", "all => all.map(one => [one.innerText, Number(one.dataset.rate)])"
    )
    expected = [
        *measured.stage_bubble_rates,
        measured.bubble_rate,
        measured.predict().bubble_rate,
    ]
    assert [rate for _, rate in rates] == pytest.approx(expected)
    assert [text for text, _ in rates] == [f"{100 * rate:.2f} %" for rate in expected]
    assert f"{100 * measured.bubble_rate:.2f} %" in run.page.locator("#figures").inner_text()
    works = run.page.locator("#table tr[data-stage] td:nth-child(2)").all_inner_texts()
    assert [*map(float, works)] == pytest.approx(measured.work, abs=0.006)


def test_a_figure_and_its_unit_stay_on_one_line(run: Opened) -> None:
    """In a tile too narrow for the note, which then has a line for each."""
    note = run.page.locator("#figures > div:nth-child(2) .note")
    note.evaluate("one => { one.style.width = '1em'; }")
    lines = note.locator("span").evaluate_all("all => all.map(one => one.getClientRects().length)")
    height = note.evaluate("one => one.offsetHeight / parseFloat(getComputedStyle(one).lineHeight)")
    note.evaluate("one => { one.style.width = ''; }")
    assert re.fullmatch(r"predicted \d+\.\d\d ms \([+-]\d+\.\d %\)", note.inner_text())
    assert lines == [1, 1]
    assert round(height) == 3


def test_the_wheel_zooms_at_the_pointer_and_a_double_click_shows_all(run: Opened) -> None:
    run.reset()
    everything = run.count("[data-panel=measured] rect.pass")
    target = run.page.locator("[data-panel=measured] rect.pass.F[data-stage='1']").nth(3)
    target.hover()
    before = run.page.locator("#tip strong").inner_text(), run.ms("start")
    run.page.mouse.wheel(0, -600)
    run.page.wait_for_function("state.view.end < whole().end / 2 && !state.isDue")
    zoomed = run.count("[data-panel=measured] rect.pass")
    assert 0 < zoomed < everything / 2
    assert (run.page.locator("#tip strong").inner_text(), run.ms("start")) == before
    target = run.page.locator("[data-panel=measured] rect.pass[data-stage='1']").first
    target.dblclick()
    run.page.wait_for_function("state.view.end === whole().end && !state.isDue")
    assert run.count("[data-panel=measured] rect.pass") == everything


def test_keys_zoom_and_pan_and_dragging_pans(run: Opened) -> None:
    run.reset()
    everything = run.count("#chart rect.pass")
    for _ in range(3):
        run.page.keyboard.press("+")
    run.redrawn()
    assert run.count("#chart rect.pass") < everything
    begin = run.page.evaluate("state.view.begin")
    run.page.keyboard.press("ArrowRight")
    assert run.page.evaluate("state.view.begin") > begin
    run.page.keyboard.press("ArrowLeft")
    assert run.page.evaluate("state.view.begin") == pytest.approx(begin)
    box = run.page.locator("#chart").bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + 60
    run.page.mouse.move(x, y)
    run.page.mouse.down()
    run.page.mouse.move(x - 200, y)
    run.page.mouse.up()
    assert run.page.evaluate("state.view.begin") > begin
    for _ in range(6):
        run.page.keyboard.press("-")
    run.redrawn()
    assert run.count("#chart rect.pass") == everything


def test_a_cause_can_be_seen_alone(run: Opened) -> None:
    button = run.page.locator("#causes button[data-cause=gradient]")
    button.click()
    run.redrawn()
    assert run.count("#chart.focused .gap.gradient.chosen") > 0
    assert run.count("#chart .gap.chosen:not(.gradient)") == 0
    run.page.locator("#causes button[data-cause=gradient][aria-pressed=true]").click()
    run.redrawn()
    assert run.count("#chart.focused") == 0


def test_idle_time_says_what_it_waits_for(run: Opened) -> None:
    run.reset()
    gaps = run.page.locator("[data-panel=measured] .gap.gradient[data-stage='0']")
    widths = gaps.evaluate_all("all => all.map(one => one.getBBox().width)")
    gaps.nth(widths.index(max(widths))).hover()
    assert run.page.locator("#tip strong").inner_text() == "waiting for a gradient from stage 1"
    longest = max(
        gap.duration for gap in measured_gaps(run.measured[0])[0] if gap.cause is Cause.GRADIENT
    )
    assert run.ms("duration") == pytest.approx(longest, abs=0.006)


def test_another_iteration_and_another_pipeline(run: Opened) -> None:
    shown = [f"{100 * one.bubble_rate:.2f} %" for one in run.measured]
    rate = run.page.locator("#table tr.total.first .rate")
    run.page.select_option("#iteration", label="11")
    assert rate.inner_text() == shown[1]
    run.page.select_option("#pipeline", label="ranks 50, 51, 52, 53")
    assert rate.inner_text() == shown[2]
    assert run.page.locator("#iteration").is_hidden()
    run.page.select_option("#pipeline", label="ranks 0, 1, 2, 3")
    assert rate.inner_text() == shown[0]


def test_light_and_dark(run: Opened) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = run.page.evaluate(colour)
    run.page.click("#theme")
    assert run.page.evaluate(colour) != light
    run.page.click("#theme")
    assert run.page.evaluate(colour) == light


def test_nothing_is_loaded_and_nothing_goes_wrong(run: Opened) -> None:
    own = (run.directory / "page.html").as_uri()
    assert run.page.title() == "zero-bubble trace"
    assert [url for url in run.requests if url != own and not url.startswith("data:")] == []
    assert run.complaints == []


def test_many_passes_are_drawn_as_few_shapes_and_still_answer(
    browser: Browser, tmp_path: Path
) -> None:
    large = opened(browser, tmp_path, "zb-h1", 12, 96)
    assert large.count("#chart rect.pass") == 0
    assert 0 < large.count("#chart path.pass") <= 2 * 12 * 3
    large.page.locator("[data-panel=measured] path.pass.F[data-stage='5']").hover()
    assert large.page.locator("#tip strong").inner_text()
    large.page.evaluate("look(100, 50)")
    large.redrawn()
    assert large.count("[data-panel=measured] rect.pass") > 0
    assert large.complaints == []
    large.page.close()


def test_a_name_from_a_file_cannot_end_the_script() -> None:
    name = "</script><b id=evil>"
    schedule = dataclasses.replace(build("zb-h1", 2, 3), name=name)
    assert name not in page(merge(made_run(schedule)).measured)


def test_no_page_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least one"):
        page([])
