"""What a rule for a family says where there is none."""


class MissingRuleError(NotImplementedError):
    """No closed form is known for these distributions; the message says what to register or to use instead.

    A `NotImplementedError` of its own, so that one raised by a rule of the user's is not mistaken for it.
    """
