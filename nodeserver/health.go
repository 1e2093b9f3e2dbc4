package nodeserver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// NodeGetVolumeHealth implements csi.NodeServer.
func (s *Server) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	if err := translate.Required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	paths := []string{req.GetStagingTargetPath(), req.GetVolumePublishPath()}
	b, v, err := s.findMounted(ctx, req.GetVolumeId(), paths...)
	if errors.Is(err, volume.ErrDamaged) { // the conditions contain the damage
		v.ID, err = volume.ParseID(req.GetVolumeId())
	}
	if err != nil {
		return s.outageHealth(req.GetVolumeId(), err)
	}
	var found []backend.Condition
	if h, ok := b.(backend.HealthChecker); ok {
		found = h.Health(ctx, v)
	}
	onNode, err := nodeConditions(ctx, b, v, req)
	if err != nil {
		return nil, err
	}
	return &csi.NodeGetVolumeHealthResponse{
		VolumeHealth: translate.VolumeHealth(req.GetVolumeId(), append(found, onNode...)),
	}, nil
}

// outageHealth returns the health of a volume whose lookup failed with err because its pool is not
// available. It returns err if the backend reports no condition for that.
func (s *Server) outageHealth(id string, err error) (*csi.NodeGetVolumeHealthResponse, error) {
	b, parsed, unknown := s.backends.ByID(id)
	reporter, ok := b.(backend.OutageReporter)
	if unknown != nil || !ok {
		return nil, err
	}
	found := reporter.Outage(parsed, err)
	if len(found) == 0 {
		return nil, err
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: translate.VolumeHealth(id, found)}, nil
}

// nodeConditions checks the device and the mounts of a volume on this node. A missing device is a
// condition only if the request contains a path, because the volume must be staged or published then.
func nodeConditions(ctx context.Context, b backend.Backend, v volume.Volume, req *csi.NodeGetVolumeHealthRequest) ([]backend.Condition, error) {
	source, ok, err := b.Present(ctx, v)
	if err != nil {
		return nil, err
	}
	if !ok {
		if req.GetVolumePublishPath() == "" && req.GetStagingTargetPath() == "" {
			return nil, nil
		}
		return []backend.Condition{{
			Severity: backend.Inaccessible, Reason: backend.ReasonDeviceDetached,
			Message: fmt.Sprintf("volume %s has no device on this node: another program detached the device, or the node restarted: stage the volume again", req.GetVolumeId()),
		}}, nil
	}
	found, err := pathConditions(ctx, b, v, req)
	if err != nil {
		return nil, err
	}
	problems, err := source.Problems()
	for _, p := range problems {
		c := problemConditions[p.Kind]
		c.Message = p.Message
		found = append(found, c)
	}
	return found, err
}

// problemConditions holds the severity and the reason of the condition for each kind of problem.
var problemConditions = map[mount.ProblemKind]backend.Condition{
	mount.RecordedErrors: {Severity: backend.Degraded, Reason: backend.ReasonFilesystemErrors},
	mount.MadeReadOnly:   {Severity: backend.Degraded, Reason: backend.ReasonFilesystemReadOnly},
	mount.ShutDown:       {Severity: backend.Inaccessible, Reason: backend.ReasonFilesystemShutDown},
	mount.Unreachable:    {Severity: backend.Inaccessible, Reason: backend.ReasonDirectoryUnreachable},
}

// pathConditions checks that the volume is mounted at the paths of the request.
func pathConditions(ctx context.Context, b backend.Backend, v volume.Volume, req *csi.NodeGetVolumeHealthRequest) ([]backend.Condition, error) {
	paths := []string{req.GetVolumePublishPath()}
	if !v.Block { // a staged raw volume has a device, and no mount
		paths = append(paths, req.GetStagingTargetPath())
	}
	var missing []string
	for _, path := range paths {
		if path == "" {
			continue
		}
		mounted, err := mount.IsMountPoint(path)
		if err != nil {
			return nil, err
		}
		if mounted {
			source, err := owner(ctx, b, v, path)
			mounted = source != nil || err != nil // after an error, the mount exists, and Problems reports the error
		}
		if !mounted {
			missing = append(missing, path)
		}
	}
	if len(missing) == 0 {
		return nil, nil
	}
	return []backend.Condition{{
		Severity: backend.Inaccessible, Reason: backend.ReasonNotMounted,
		Message: fmt.Sprintf("volume %s is not mounted at %s: another program unmounted it, or it was never mounted: unpublish the volume and publish it again", req.GetVolumeId(), strings.Join(missing, ", ")),
	}}, nil
}

// NodeGetStorageHealth implements csi.NodeServer. CSI requires one message for each status
// and reason, so pools with the same condition share one message.
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

// storageConditions returns the conditions that the backends report. If two backends report the same
// reason for one pool, only the conditions of the first backend are returned. One backend may report
// a reason several times, such as for two disks.
func (s *Server) storageConditions(ctx context.Context) []backend.Condition {
	var found []backend.Condition
	for _, h := range backend.As[backend.HealthChecker](s.backends) {
		ofOtherBackends := found
		for _, c := range h.StorageHealth(ctx) {
			known := func(have backend.Condition) bool { return have.Pool == c.Pool && have.Reason == c.Reason }
			if !slices.ContainsFunc(ofOtherBackends, known) {
				found = append(found, c)
			}
		}
	}
	return found
}

// NodeGetVolumeStats implements csi.NodeServer. It returns the bytes and inodes of a filesystem, or the
// size of a raw device.
func (s *Server) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	id, path := req.GetVolumeId(), req.GetVolumePath()
	if err := requireIDAndPath(id, path); err != nil {
		return nil, err
	}
	b, v, err := s.findMounted(ctx, id, path)
	if err != nil {
		return nil, err
	}
	at, err := inspectVolumePath(id, path)
	if err != nil {
		return nil, err
	}
	var source mount.Source
	if at.IsMount {
		if source, err = owner(ctx, b, v, path); err != nil {
			return nil, explainStale(err)
		}
	}
	if source == nil {
		return nil, volume.Errorf(volume.ErrNotFound, "volume_path %q: volume %s is not mounted at that path", path, id)
	}
	if v.Block {
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
			{Unit: csi.VolumeUsage_BYTES, Total: v.Capacity},
		}}, nil
	}
	resp, err := filesystemStats(path)
	if meter, ok := b.(backend.Meter); ok && err == nil {
		err = replaceUsage(ctx, meter, v, resp)
	}
	return resp, err
}

// replaceUsage replaces the usage of the whole filesystem in a response with the usage of the volume, if
// the backend can measure the volume.
func replaceUsage(ctx context.Context, meter backend.Meter, v volume.Volume, resp *csi.NodeGetVolumeStatsResponse) error {
	m, ok, err := meter.Measure(ctx, v)
	if err != nil || !ok {
		return err
	}
	for _, u := range resp.GetUsage() {
		total, used := m.Bytes, m.UsedBytes
		if u.GetUnit() == csi.VolumeUsage_INODES {
			total, used = m.Inodes, m.UsedInodes
		}
		if total > 0 {
			u.Total, u.Used, u.Available = total, used, max(0, min(u.GetAvailable(), total-used))
		}
	}
	return nil
}

// filesystemStats returns the usage of the filesystem at a path.
func filesystemStats(path string) (*csi.NodeGetVolumeStatsResponse, error) {
	st, err := mount.Statfs(path)
	if err != nil {
		return nil, explainStale(err)
	}
	usage := []*csi.VolumeUsage{{
		Unit:      csi.VolumeUsage_BYTES,
		Total:     int64(st.Blocks) * st.Frsize,
		Available: int64(st.Bavail) * st.Frsize,
		Used:      int64(st.Blocks-st.Bfree) * st.Frsize,
	}}
	if st.Files > 0 { // btrfs does not count inodes
		usage = append(usage, &csi.VolumeUsage{
			Unit:      csi.VolumeUsage_INODES,
			Total:     int64(st.Files),
			Available: int64(st.Ffree),
			Used:      int64(st.Files - st.Ffree),
		})
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: usage}, nil
}

// explainStale wraps ESTALE in ErrPrecondition with an explanation. Other errors are unchanged.
func explainStale(err error) error {
	if err = mount.ExplainStale(err); errors.Is(err, mount.ErrStale) {
		return volume.Errorf(volume.ErrPrecondition, "%w", err)
	}
	return err
}
