package freeze

// Command is the word that makes this program a guardian (Guard). The driver starts it,
// and nobody else does. The filesystems' names follow it for those who list processes.
const Command = "freeze-guard"
