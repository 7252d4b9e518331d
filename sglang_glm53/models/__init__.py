"""The model classes that SGLang's registry finds here, each by its ``EntryClass``."""
