"""Ranks other than 0 know what the log of rank 0 knows, and neither write nor speak."""

from pathlib import Path

import pytest

from fastgrpo.config.settings import GRPOConfig
from fastgrpo.ranks import ALONE, Ranks
from fastgrpo.run.log import FollowedLog, RunLog, open_log


class Told(Ranks):
    """A rank that is told what rank 0 says."""

    def __init__(self, rank, said=None):
        super().__init__(rank, 2)
        self.said = said

    def from_lead(self, value, what):
        self.said = value if self.lead else self.said
        return self.said


def test_rank_0_claims_the_folder_and_tells_the_others(tmp_path):
    config, lead = GRPOConfig(output_dir=str(tmp_path / "run"), metric_for_best_model="reward"), Told(0)
    with open_log(config, ranks=lead) as log:
        other = open_log(config, ranks=Told(1, lead.said))
        assert type(log) is RunLog and type(other) is FollowedLog
        assert other.dir == log.dir == (tmp_path / "run").resolve() and other.checkpoint is None
    assert type(open_log(GRPOConfig(output_dir=str(tmp_path / "alone")), ranks=ALONE)) is RunLog


def test_the_other_ranks_write_nothing_and_remember_the_metrics(tmp_path, capfd):
    with FollowedLog(GRPOConfig(logging_steps=2), tmp_path, None) as log:
        log.folder.check()
        log.say("nobody reads this")
        log.terminal.progress(10, "GRPO")
        log.terminal.advance(reward=1.0)
        log.step(1, {"reward": 1.0})
        assert log.latest == {}
        log.step(2, {"reward": 2.0})
        log.samples([{"step": 1}])
        log.load_state_dict({"pending": [[3, {"reward": 4.0}]], "metrics_bytes": 0})
        log.step(4, {"reward": 2.0})
        assert log.latest == {"reward": (4, 3.0)}
        assert log.folder.claim("merged") == Path(tmp_path / "merged") and log.folder.held
        log.terminal.close_bar()
    assert not list(tmp_path.iterdir()) and capfd.readouterr() == ("", "")


def test_all_ranks_refuse_to_go_on_once_the_run_has_ended(tmp_path):
    config, lead = GRPOConfig(output_dir=str(tmp_path / "run")), Told(0)
    logs = [open_log(config, ranks=lead)]
    logs.append(open_log(config, ranks=Told(1, lead.said)))
    said = []
    for log in logs:
        with log:
            log.folder.check()
        assert not log.folder.held
        for go_on in (log.folder.check, log.__enter__):
            with pytest.raises(ValueError, match="no longer holds output_dir") as refused:
                go_on()
            said.append(str(refused.value))
    assert len(set(said)) == 1
