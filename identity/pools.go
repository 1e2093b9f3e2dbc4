package identity

import "strings"

// poolPrefix begins the keys of pools in a plugin's manifest (CSI specification,
// GetPluginInfoResponse: opaque to the orchestrator). The value is the pool's UUID
// as in volume IDs, empty if it is not open.
const poolPrefix = "pool."

// Manifest encodes the pools of a node's driver, UUIDs by name.
func Manifest(pools map[string]string) map[string]string {
	manifest := map[string]string{}
	for name, uuid := range pools {
		manifest[poolPrefix+name] = uuid
	}
	return manifest
}

// Pools decodes a manifest that Manifest returned.
func Pools(manifest map[string]string) map[string]string {
	pools := map[string]string{}
	for key, uuid := range manifest {
		if name, ok := strings.CutPrefix(key, poolPrefix); ok {
			pools[name] = uuid
		}
	}
	return pools
}
