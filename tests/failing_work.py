"""Work that fails on one of its tasks, for the tests of all engines."""


class Unlucky(ValueError):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def fail_on_three(number: int) -> int:
    if number == 3:
        raise Unlucky(number)
    return number
