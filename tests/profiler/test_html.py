"""The page: escaped, complete in itself, and at work in a browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from opsmith.profiler.data import ATTENTION, FRAMEWORK, MATMUL, NORM, Advice, Chain, Event, Phase, Row
from opsmith.profiler.result import Profile
from opsmith.profiler.roofline import Roofs, judge

EVIL = '<img src=x onerror="document.title=1"></script>'
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def sample(events: int = 60) -> Profile:
    """A profile whose every name is an attack."""
    kinds = (MATMUL, NORM, ATTENTION)
    rows = [
        Row(
            k,
            f"op{i}{EVIL}",
            f"x 8×{i}",
            f"layers.{i % 4}{EVIL}",
            dtype="float32",
            seconds=1e-3 * (i + 1),
            calls=2,
        )
        for i, k in enumerate(kinds * 4)
    ]
    for row in rows:
        row.flops, row.bytes, row.refused, row.source = 1e7, 1e5, {EVIL: EVIL}, EVIL
    rows.append(Row(FRAMEWORK, "between operators", "", seconds=1e-3))
    wall = sum(r.seconds for r in rows)
    step = wall / events
    phase = Phase(f"forward{EVIL}", wall, samples=[wall] * 3, tokens=8, rows=rows)
    phase.events = [Event(f"op{i % 12}", kinds[i % 3], i * step, step, EVIL, EVIL) for i in range(events)]
    phase.chains = [Chain([EVIL, "add"], 2, 1e6, 1e-4)]
    phase.advice = [Advice(EVIL, EVIL, EVIL, EVIL, 1e-3, 1.1, EVIL, EVIL)]
    profile = Profile(EVIL, [phase], {"cpu": EVIL}, versions={"torch": "2", "opsmith": "0"}, partial=EVIL)
    roofs = Roofs()
    roofs.rates = {"memory": 5e10, "matmul float32": 2e11, "calls": 1e6}
    profile.roofs = dict(roofs.rates)
    judge(rows, roofs)
    return profile


def test_names_are_escaped_and_nothing_is_loaded() -> None:
    page = sample().to_html()
    assert "<img" not in page
    assert page.count("</script>") == 2  # the data and the program
    assert "&lt;img src=x" in page
    assert not re.findall(r'(?:src|href)="(?!#|data:)', page)
    assert "http" not in page.replace("http-equiv", "")


def test_the_number_of_events_does_not_reach_the_document() -> None:
    few, many = sample(60).to_html(), sample(20_000).to_html()
    assert few.count("<td") == many.count("<td")
    assert len(many) - len(few) < 30 * 20_000


def in_browser(page: str, script: str, folder: Path) -> str:
    """The document's title once the script has run in a browser that has complained of nothing."""
    file = folder / "page.html"
    # After loading, as a person clicks: a browser that is still loading goes to a fragment again, and takes the focus.
    late = f"<script>addEventListener('load', () => setTimeout(() => {{ {script} }}));</script></body>"
    file.write_text(page.replace("</body>", late))
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={folder / 'browser'}",
            "--enable-logging=stderr",
            "--virtual-time-budget=5000",
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert complaints == []
    match = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert match
    return match[1]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_filters_and_clicks_work(tmp_path: Path) -> None:
    script = """
      const shown = () => [...document.querySelectorAll("tbody tr[data-kind]")].filter(r => !r.hidden).length;
      const all = shown(), out = [all > 0];
      const norm = document.querySelector('input.kind[value="Norm"]');
      norm.click();
      const norms = [...document.querySelectorAll('[data-kind="Norm"]')];
      out.push(shown() < all, norms.every(r => r.hasAttribute("hidden")));
      norm.click(); out.push(shown() === all);
      const search = document.getElementById("search");
      search.value = "op3"; search.dispatchEvent(new Event("input"));
      out.push(shown() > 0 && shown() < all);
      search.value = ""; search.dispatchEvent(new Event("input"));
      const dot = document.querySelector("svg a");
      location.hash = dot.getAttribute("href");
      setTimeout(() => {
        const detail = document.getElementById(location.hash.slice(1)).querySelector("details");
        out.push(detail.open, document.activeElement === detail.querySelector("summary"));
        const canvas = document.querySelector("canvas"), c = canvas.getContext("2d");
        out.push(c.getImageData(canvas.width / 2, 5, 1, 1).data[3] > 0);
        out.push(document.documentElement.scrollWidth <= innerWidth);
        document.title = out.join(" ");
      }, 500);
    """
    assert in_browser(sample().to_html(), script, tmp_path) == " ".join(["true"] * 9)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
def test_a_page_of_many_events_opens(tmp_path: Path) -> None:
    script = "document.title = data.timelines[0].start.length + ' ' + document.querySelectorAll('*').length"
    count, elements = in_browser(sample(100_000).to_html(), script, tmp_path).split()
    assert int(count) == 100_000
    assert int(elements) < 2000
