"""What a service knows about itself: its table, the actor that owns it, and both sides that talk to it."""
