package router

// State describes the router's connection to a node.
type State struct {
	Name string
	// Connected is true if a call would be sent immediately.
	Connected bool
	// Conflicts is the number of the node's pools that another node also announces, or that are recorded
	// for another node.
	Conflicts int
}

// States returns the states of all nodes, sorted by name. It returns none before SetHosts was called.
func (s *Server) States() []State {
	all, _ := s.nodes.all()
	states := make([]State, 0, len(all))
	for _, n := range all {
		state := State{Name: n.name, Connected: n.connected()}
		for _, key := range n.view().pools {
			if len(s.nodes.announcing(key)) > 1 || s.nodes.ownedByOther(n, key) {
				state.Conflicts++
			}
		}
		states = append(states, state)
	}
	return states
}
