"""What users may set: the options of a task and of a call, and the settings of an app and of beat."""
