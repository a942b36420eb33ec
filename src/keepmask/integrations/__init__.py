"""keepmask inside other people's trainers; each module needs the library it is named after."""
