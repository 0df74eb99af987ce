"""Index arrays of steps reach the kernels without anything being left behind."""

import gc

import numpy as np

from workers.engine import runtime


def test_a_thousand_steps_leave_nothing_and_have_their_own_values() -> None:
    runtime.configure(1)
    from workers.engine.ops.step_inputs import InputBuffers

    def lists() -> int:
        gc.collect()
        return sum(type(each) is list for each in gc.get_objects())

    buffers, rng = InputBuffers(), np.random.default_rng(1)
    buffers.tensor("spans", np.zeros((100, 4), np.int32))
    before = lists()
    for _ in range(1000):
        array = rng.integers(0, 9, (int(rng.integers(1, 100)), 4), np.int32)
        np.testing.assert_array_equal(buffers.tensor("spans", array).numpy(), array)
    assert lists() - before < 100
