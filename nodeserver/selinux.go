package nodeserver

import (
	"cmp"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// checkContext returns an error that wraps kind if the volume is mounted at path with another SELinux context than that
// of the request. All mounts of a filesystem have the same context. A request without one is compatible with every
// context, because SELinux decides about the access.
func checkContext(kind error, r request, source mount.Source, path string) error {
	if r.options.Context == "" {
		return nil
	}
	mounted, err := mount.ContextAt(path)
	if err != nil || mounted == r.options.Context {
		return err
	}
	requested, err := mount.CanonicalContext(r.options.Context)
	if err != nil || mounted == requested {
		return backend.ExplainMount(err)
	}
	return volume.Errorf(kind, "volume %s (%s) is mounted at %q with the SELinux context %s, and the request has %s: %s",
		r.id, source, path, cmp.Or(mounted, "(none)"), r.options.Context, backend.SameContext)
}
