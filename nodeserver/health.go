package nodeserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/blockdev"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// NodeGetVolumeHealth implements csi.NodeServer.
func (s *Server) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	if err := required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	id, err := volume.ParseID(req.GetVolumeId())
	shared := err == nil && id.Shared()
	if s.isStatic(req.GetVolumeId()) {
		return staticHealth(req)
	}
	b, v, err := s.find(ctx, req.GetVolumeId())
	if errors.Is(err, volume.ErrUnavailable) && shared { // that is an answer
		return &csi.NodeGetVolumeHealthResponse{
			VolumeHealth: translate.VolumeHealth(req.GetVolumeId(), []backend.Condition{backend.PoolUnavailable(err)}),
		}, nil
	}
	if err != nil {
		return nil, err
	}
	var found []backend.Condition
	if h, ok := b.(backend.HealthChecker); ok {
		found = h.Health(ctx, v)
	}
	here, err := nodeConditions(ctx, b, v, req)
	if err != nil {
		return nil, err
	}
	return &csi.NodeGetVolumeHealthResponse{
		VolumeHealth: translate.VolumeHealth(req.GetVolumeId(), append(found, here...)),
	}, nil
}

// nodeConditions looks at the volume's device and mounts on this node. Only a
// volume that the request says is used here has to be here.
func nodeConditions(ctx context.Context, b backend.Backend, v volume.Volume, req *csi.NodeGetVolumeHealthRequest) ([]backend.Condition, error) {
	source, ok, err := b.Present(ctx, v)
	if err != nil {
		return nil, err
	}
	if !ok {
		if req.GetVolumePublishPath() == "" && req.GetStagingTargetPath() == "" {
			return nil, nil
		}
		if v.Directory != nil {
			return []backend.Condition{notMounted(v, "any path")}, nil
		}
		return []backend.Condition{{
			Severity: backend.Inaccessible, Reason: backend.ReasonDeviceDetached,
			Message: fmt.Sprintf("volume %s has no device on this node: it was detached behind the driver's back, or the node restarted; stage it again", v.ID),
		}}, nil
	}
	found, err := pathConditions(ctx, b, v, req)
	if err != nil || v.Block {
		return found, err
	}
	var broken []backend.Condition
	if source.Device == "" {
		broken, err = directoryConditions(source)
	} else {
		broken, err = filesystemConditions(source.Device)
	}
	return append(found, broken...), err
}

// pathConditions looks at the paths that the request says the volume is at. One
// that cannot be looked at is left to what looks at its filesystem.
func pathConditions(ctx context.Context, b backend.Backend, v volume.Volume, req *csi.NodeGetVolumeHealthRequest) ([]backend.Condition, error) {
	paths := []string{req.GetVolumePublishPath()}
	if !v.Block { // whose device is all there is of being staged
		paths = append(paths, req.GetStagingTargetPath())
	}
	var gone []string
	for _, path := range paths {
		if path == "" {
			continue
		}
		at, broken, err := inspectMount(v.ID, path)
		if broken {
			continue
		}
		if err != nil {
			return nil, err
		}
		there, err := published(ctx, b, v, path, at)
		if err == nil && !there {
			gone = append(gone, path)
		}
	}
	if len(gone) == 0 {
		return nil, nil
	}
	return []backend.Condition{notMounted(v, strings.Join(gone, ", "))}, nil
}

func notMounted(v volume.Volume, where string) backend.Condition {
	return backend.Condition{
		Severity: backend.Inaccessible, Reason: backend.ReasonNotMounted,
		Message: fmt.Sprintf("volume %s is not mounted at %s: it was unmounted behind the driver's back, or never was; unpublish and publish it again", v.ID, where),
	}
}

func filesystemConditions(device string) ([]backend.Condition, error) {
	mounts, err := mount.OfDevice(device)
	if err != nil || len(mounts) == 0 {
		return nil, err
	}
	var found []backend.Condition
	m := mounts[0]
	if n := recordedErrors(m, device); n > 0 {
		found = append(found, backend.Condition{
			Severity: backend.Degraded, Reason: backend.ReasonFilesystemErrors,
			Message: fmt.Sprintf("%s on %s has recorded %d errors: ext4 is checked when the volume is staged anew; for btrfs see btrfs device stats %s", m.FSType, device, n, m.Mountpoint),
		})
	}
	if madeReadOnly(m) {
		found = append(found, backend.Condition{
			Severity: backend.Degraded, Reason: backend.ReasonFilesystemReadOnly,
			Message: fmt.Sprintf("%s on %s has made itself read-only after an error: see the kernel's log, then unstage the volume and stage it again", m.FSType, device),
		})
	}
	if _, err := isEmpty(m.Mountpoint); err != nil {
		found = append(found, backend.Condition{
			Severity: backend.Inaccessible, Reason: backend.ReasonFilesystemShutDown,
			Message: fmt.Sprintf("%s on %s does not answer: %v: see the kernel's log, then unstage the volume and stage it again", m.FSType, device, err),
		})
	}
	return found, nil
}

// madeReadOnly tells whether a filesystem that is mounted to be written takes no
// writes any more; Linux 6.14 and later have a word of their own for that in
// ext4.
func madeReadOnly(m *mount.Entry) bool {
	return !isReadOnly(m.Options) && (isReadOnly(m.VFSOptions) || slices.Contains(strings.Split(m.VFSOptions, ","), "emergency_ro"))
}

// recordedErrors counts the errors that a filesystem has recorded of itself; xfs
// records none, it shuts down.
func recordedErrors(m *mount.Entry, device string) uint64 {
	switch m.FSType {
	case "ext4": // kernel documentation, ABI/testing/sysfs-fs-ext4
		name, err := blockdev.KernelName(device)
		if err != nil {
			return 0
		}
		b, err := os.ReadFile("/sys/fs/ext4/" + name + "/errors_count")
		if err != nil {
			return 0
		}
		n, _ := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
		return n
	case "btrfs":
		root, err := os.Open(m.Mountpoint)
		if err != nil {
			return 0
		}
		defer root.Close()
		n, _ := blockdev.BtrfsErrors(root)
		return n
	}
	return 0
}

// NodeGetStorageHealth implements csi.NodeServer. CSI wants one message per
// status and reason, so the pools of one condition share one.
func (s *Server) NodeGetStorageHealth(ctx context.Context, _ *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	resp := &csi.NodeGetStorageHealthResponse{}
	byReason := map[backend.Reason]*csi.NodeGetStorageHealthResponse_StorageBackendHealth{}
	for _, c := range s.storageConditions(ctx) {
		if have, ok := byReason[c.Reason]; ok {
			have.Message += "; " + c.Message
			continue
		}
		status := csi.StorageHealthErrorType_STORAGE_UNREACHABLE
		if c.Severity == backend.Degraded {
			status = csi.StorageHealthErrorType_STORAGE_DEGRADED
		}
		entry := &csi.NodeGetStorageHealthResponse_StorageBackendHealth{Status: status, Reason: string(c.Reason), Message: c.Message}
		byReason[c.Reason] = entry
		resp.BackendHealth = append(resp.BackendHealth, entry)
	}
	return resp, nil
}

// storageConditions are what the backends find. What one of them says of a pool no other
// says again; of the same one, such as of two disks, all is told.
func (s *Server) storageConditions(ctx context.Context) []backend.Condition {
	var found []backend.Condition
	for _, h := range backend.As[backend.HealthChecker](s.backends) {
		others := found
		for _, c := range h.StorageHealth(ctx) {
			known := func(have backend.Condition) bool { return have.Pool == c.Pool && have.Reason == c.Reason }
			if !slices.ContainsFunc(others, known) {
				found = append(found, c)
			}
		}
	}
	return found
}
