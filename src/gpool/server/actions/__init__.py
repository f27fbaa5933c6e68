"""Actions behind the routes: permission, transaction, effect on the scheduler."""
