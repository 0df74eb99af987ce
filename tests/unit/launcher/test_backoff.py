from app.launcher.backoff import Backoff, BackoffPolicy


def test_the_delay_doubles_from_half_a_second_to_thirty() -> None:
    backoff = Backoff(BackoffPolicy())
    assert [backoff.delay_after(ran_for_s=1.0) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_minute_of_health_forgets_earlier_crashes() -> None:
    backoff = Backoff(BackoffPolicy())
    for _ in range(5):
        backoff.delay_after(ran_for_s=59.9)
    assert backoff.delay_after(ran_for_s=60.0) == 0.5
    assert backoff.delay_after(ran_for_s=0.0) == 1.0
