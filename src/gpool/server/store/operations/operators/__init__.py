"""Operations on operators' rules and on the usage of users and teams."""
