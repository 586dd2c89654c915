TIED = " tied"  # ends the name of a scenario whose model has one weight for embedding and head
