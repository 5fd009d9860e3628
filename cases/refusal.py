"""Bad input of any kind: one clear line that names the field and the fix."""


class Refusal(ValueError):
    """What a user gave cannot be taken as it is; the message is one line that says where and what would be right."""
