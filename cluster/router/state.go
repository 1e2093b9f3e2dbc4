package router

// State describes the router's connection to a node.
type State struct {
	Name string
	// Connected reports whether a call would be sent at once.
	Connected bool
	// Shared is the number of its pools that another node announces too or is recorded for.
	Shared int
}

// States returns the states of all nodes by name; none before SetHosts was called.
func (s *Server) States() []State {
	all, _ := s.nodes.all()
	states := make([]State, 0, len(all))
	for _, n := range all {
		state := State{Name: n.name, Connected: n.connected()}
		for _, key := range n.view().pools {
			if len(s.nodes.announcing(key)) > 1 || s.nodes.foreign(n, key) {
				state.Shared++
			}
		}
		states = append(states, state)
	}
	return states
}
