package pool

// Config finds a pool's configuration by its name, whether the pool is open or not.
func (s *Set) Config(name string) (c Config, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slot := range s.pools {
		if slot.cfg.Name == name {
			return slot.cfg, true
		}
	}
	return Config{}, false
}
