"""Tables and figures from results/ alone; nothing here imports torch."""
