"""The run on a GPU goes through all of its own code without one, and its page says what the files say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import gpu_page

HERE = Path(__file__).parents[1]
pytest.importorskip("triton")


def test_a_dry_run_leaves_the_result_of_every_job(tmp_path: Path) -> None:
    told = ["--dry", "--together", "--folder", str(tmp_path)]
    run = [sys.executable, "-W", "ignore", "benchmarks/gpu.py", *told]
    done = subprocess.run(run, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = gpu_page.collect(tmp_path)
    assert {stage: len(jobs) for stage, jobs in found.items()} == dict.fromkeys(
        ("machine", "verify", "graphs", "models", "fast"), 1
    )
    assert found["verify"][0]["checks"] > 20
    assert found["models"][0]["error"] < 0.1
    assert [one["ok"] for stage, jobs in found.items() if stage != "machine" for one in jobs] == [True] * 4
    # What has left a file is not run again.
    again = subprocess.run(run, cwd=HERE, capture_output=True, text=True, check=False)
    assert [line.split()[0] for line in again.stdout.splitlines()] == ["ok"] * 5
    assert gpu_page.collect(tmp_path) == found


def test_a_job_that_fails_is_named(tmp_path: Path) -> None:
    said = {"stage": "verify", "job": "rope-float32", "ok": False, "failed": ["it is wrong"], "seconds": 1.0}
    machine = {
        "stage": "machine",
        "job": "machine",
        "nvidia-smi": {"name": "a GPU"},
        "torch": "2",
        "triton": "3",
    }
    results = tmp_path / "gpu-today.json"
    results.write_text(json.dumps({"machine": [machine], "verify": [said], "fast": []}))
    text = gpu_page.page(results, gpu_page.KERNELS)
    assert "| verify | 1 | 1 | rope-float32: it is wrong |" in text


def test_the_page_says_what_the_newest_file_says() -> None:
    newest = max(gpu_page.RESULTS.glob("gpu-*.json"), default=None)
    assert gpu_page.PAGE.read_text() == gpu_page.page(newest, gpu_page.KERNELS)
    assert "No machine with a GPU has run it yet" in gpu_page.page(None, gpu_page.KERNELS)
