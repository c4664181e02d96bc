"""The interface of a kind of model: its data, teacher, student, objective and quality."""
