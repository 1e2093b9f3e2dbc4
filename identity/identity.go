// Package identity implements the CSI Identity service: the driver's name, its capabilities and
// its readiness. It does not access volumes.
package identity

import (
	"context"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Server implements csi.IdentityServer.
type Server struct {
	csi.UnimplementedIdentityServer
	Name    string
	Version string
	// Ready reports whether calls can be served.
	Ready func() bool
	// Pools returns the UUIDs of the driver's pools by name. The UUID of a pool that is not
	// open is empty.
	Pools func() map[string]string
	// Expected returns, by name, the UUIDs of pools that are not open now and were open before.
	Expected func() map[string]string
	// Kinds are the kinds of the driver's pools (pool.Kind) by name.
	Kinds map[string]string
	// Usable returns ErrPrecondition if no call can succeed.
	Usable func() error
}

// GetPluginInfo implements csi.IdentityServer.
func (s *Server) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: s.Name, VendorVersion: s.Version, Manifest: Manifest(s.Pools(), s.Expected(), s.Kinds)}, nil
}

// GetPluginCapabilities implements csi.IdentityServer. Every process of the plugin returns the same
// capabilities, whichever services the process serves (CSI specification,
// "GetPluginCapabilities"). The alpha capability SNAPSHOT_ACCESSIBILITY_CONSTRAINTS is omitted, because
// no sidecar of Kubernetes uses it, and csi-sanity 5.6 fails a driver that returns the topology of a
// snapshot.
func (s *Server) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	resp := &csi.GetPluginCapabilitiesResponse{}
	add := func(c *csi.PluginCapability) { resp.Capabilities = append(resp.Capabilities, c) }
	add(service(csi.PluginCapability_Service_CONTROLLER_SERVICE))
	add(service(csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE))
	add(service(csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE))
	add(service(csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS))
	add(&csi.PluginCapability{Type: &csi.PluginCapability_VolumeExpansion_{
		VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: csi.PluginCapability_VolumeExpansion_ONLINE},
	}})
	return resp, nil
}

func service(t csi.PluginCapability_Service_Type) *csi.PluginCapability {
	return &csi.PluginCapability{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}}}
}

// Probe implements csi.IdentityServer.
func (s *Server) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	if err := s.Usable(); err != nil {
		return nil, err
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(s.Ready())}, nil
}

// poolPrefix begins the keys of pools in a plugin's manifest, which is opaque to the orchestrator (CSI
// specification, GetPluginInfoResponse). The value is the pool's UUID as in volume IDs; empty if the
// pool is not open.
const poolPrefix = "pool."

// expectedPrefix begins the keys of pools that are not open and have a UUID nevertheless: that of the
// configuration, or of the pool that was open before.
const expectedPrefix = "expected."

// kindPrefix begins the keys of the kinds of all pools.
const kindPrefix = "kind."

// Manifest encodes the UUIDs of a driver's pools by name. expected are the UUIDs of pools that are not open, and
// kinds the kinds of all pools.
func Manifest(pools, expected, kinds map[string]string) map[string]string {
	manifest := map[string]string{}
	for name, uuid := range pools {
		manifest[poolPrefix+name] = uuid
	}
	for name, uuid := range expected {
		manifest[expectedPrefix+name] = uuid
	}
	for name, kind := range kinds {
		manifest[kindPrefix+name] = kind
	}
	return manifest
}

// Pools returns the UUIDs in a manifest.
func Pools(manifest map[string]string) (pools, expected map[string]string) {
	return withPrefix(manifest, poolPrefix), withPrefix(manifest, expectedPrefix)
}

// Kinds returns the kinds of the pools in a manifest by name. Earlier versions of the driver announce none.
func Kinds(manifest map[string]string) map[string]string { return withPrefix(manifest, kindPrefix) }

// withPrefix returns the entries whose keys begin with a prefix, without the prefix.
func withPrefix(manifest map[string]string, prefix string) map[string]string {
	found := map[string]string{}
	for key, value := range manifest {
		if name, ok := strings.CutPrefix(key, prefix); ok {
			found[name] = value
		}
	}
	return found
}
