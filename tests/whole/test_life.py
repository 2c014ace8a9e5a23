"""The life of a trainer in one Python process, as in a notebook."""

import pytest
from runs import make_trainer, share_of_a

pytestmark = pytest.mark.usefixtures("without_curves")
ENDED = "this trainer no longer holds output_dir .*resume_from_checkpoint='auto'"


def test_two_trainers_in_one_process_cannot_share_a_folder(tmp_path):
    settings = {"resume_from_checkpoint": "auto"}

    def meddling(completions, **columns):
        with pytest.raises(ValueError, match=r"in use by another trainer of this process; let its train\(\) end"):
            make_trainer(tmp_path, overwrite_output_dir=True)
        return share_of_a(completions)

    first = make_trainer(tmp_path, **settings)
    with pytest.raises(ValueError, match=r"in use by another trainer of this process; .* with trainer.log.close"):
        make_trainer(tmp_path, **settings)
    first.log.close()
    second = make_trainer(tmp_path, meddling, **settings)
    assert second.train()["steps"] == 2
    for use in (first.train, first.step, second.train, second.step):
        with pytest.raises(ValueError, match=ENDED):
            use()
    assert make_trainer(tmp_path, **settings, max_steps=3).train()["steps"] == 3
