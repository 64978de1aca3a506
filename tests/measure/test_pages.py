"""Memory that goes back to the system: what is mapped comes again from its file, and what was written is never lost."""

from pathlib import Path
from typing import Any

import pytest
import torch

from opsmith.measure.pages import Read, advise, forget, is_mapped

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this is not Linux")

MB = 1 << 20


def mapped(folder: Path) -> torch.Tensor:
    torch.save(torch.arange(MB), folder / "t.pt")
    return torch.load(folder / "t.pt", mmap=True)  # type: ignore[no-any-return]


def resident(file: Path) -> int:
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(
        int(next(one for one in lines if one.startswith("Rss:")).split()[1]) << 10
        for line in lines
        if line.endswith(str(file))
    )


def test_what_is_mapped_from_a_file_goes_back_and_is_there_when_it_is_read(tmp_path: Path) -> None:
    t, read = mapped(tmp_path), Read()
    assert t.equal(torch.arange(MB))
    assert resident(tmp_path / "t.pt") > 7 * MB
    read.add(t)
    read.give_back()
    assert resident(tmp_path / "t.pt") < MB
    assert t.equal(torch.arange(MB))


def test_what_was_written_stays(tmp_path: Path) -> None:
    t, own, read = mapped(tmp_path), torch.ones(MB), Read()
    t[MB // 2] = -1
    for one in (t, own):
        read.add(one)
    read.give_back()
    assert int(t[MB // 2]) == -1
    assert bool(own.eq(1).all())


def test_what_no_file_has_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether each page of a process was written to, for every few weights of a model."""
    of_pages, read_text, own, read = Path("/proc/self/smaps"), Path.read_text, torch.ones(MB), Read()

    def counted(self: Path, *args: Any, **kwargs: Any) -> str:
        assert self != of_pages
        return read_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", counted)
    read.add(own)
    read.give_back()
    assert not is_mapped(own)


def test_what_is_forgotten_keeps_its_place() -> None:
    t = torch.ones(MB)
    at = t.data_ptr()
    forget(t)
    assert t.data_ptr() == at
    assert float(t[MB // 2]) == 0
    assert t.fill_(2).eq(2).all()


def test_large_pages_change_no_number() -> None:
    t = torch.arange(4 * MB)
    place = t.data_ptr()
    advise(place, t.nbytes, "MADV_COLLAPSE")
    assert t.data_ptr() == place
    assert t.equal(torch.arange(4 * MB))


def test_what_is_a_file_s_is_told_from_what_was_written(tmp_path: Path) -> None:
    t = mapped(tmp_path)
    assert is_mapped(t)
    assert is_mapped(t[MB // 2 :])
    assert not is_mapped(torch.ones(MB))
    t[MB // 2] = -1
    assert not is_mapped(t)
