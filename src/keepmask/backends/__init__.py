"""Who draws for a trainer: clients of servers, several of them as one, and Ray's actors (`base.Rollouts`)."""
