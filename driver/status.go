package driver

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"path"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// nodeReportTimeout limits the wait for the report of one node.
const nodeReportTimeout = 5 * time.Second

// report returns the state of this driver. The controller's driver adds the reports of all nodes.
func (d *Driver) report(ctx context.Context) status.Report {
	r := d.ownReport(ctx)
	if d.router != nil {
		var mu sync.Mutex
		d.router.EachNode(ctx, func(ctx context.Context, node string, conn grpc.ClientConnInterface) {
			part := d.nodeReport(ctx, node, conn)
			mu.Lock()
			defer mu.Unlock()
			r.Add(part)
		})
		for node, found := range d.nodeHealth.last() {
			r.AddHealth(node, found)
		}
	}
	r.Sort()
	return r
}

// nodeReport requests the report of a node.
func (d *Driver) nodeReport(ctx context.Context, node string, conn grpc.ClientConnInterface) status.Report {
	ctx, cancel := context.WithTimeout(ctx, nodeReportTimeout)
	defer cancel()
	r, err := status.Fetch(ctx, conn)
	if err != nil {
		return status.Report{Processes: []status.Process{{Node: node, Problem: err.Error()}}}
	}
	return r.From(node, func(pool, uuid string) bool { return d.router.Serves(node, pool, uuid) })
}

// ownReport returns the state of this driver.
func (d *Driver) ownReport(ctx context.Context) status.Report {
	process := status.Process{Version: d.options.Version, Calls: d.metrics.callsServed()}
	if d.options.serves("node") {
		process.Node = d.options.NodeID
	}
	if err := d.ready(); err != nil {
		process.Problem = err.Error()
	}
	if d.certificates != nil {
		process.CertificateExpires, _ = d.certificates.Expires() // ready has reported the error
	}
	r := status.Report{Time: time.Now().UTC(), Driver: d.options.Name}
	mounts, err := mount.Table(func(*mount.Entry) bool { return true })
	if err != nil {
		process.Problem = cmp.Or(process.Problem, err.Error())
	}
	for _, s := range d.pools.States() {
		pool, volumes := d.reportPool(ctx, s, mounts)
		r.Pools = append(r.Pools, pool)
		r.Volumes = append(r.Volumes, volumes...)
	}
	if err := d.reportLists(ctx, &r); err != nil && process.Problem == "" {
		process.Problem = err.Error()
	}
	if d.examiner != nil {
		found, _ := d.examiner.last() // nothing before the first examination
		r.AddHealth(d.options.NodeID, found)
	}
	r.Processes = []status.Process{process}
	return r
}

// reportPool returns the state of a pool of this node and of its volumes. mounts is the mount table.
func (d *Driver) reportPool(ctx context.Context, s pool.State, mounts []*mount.Entry) (status.Pool, []status.Volume) {
	p := status.Pool{Name: s.Name, Node: d.options.NodeID}
	err := s.Err
	if err == nil {
		err = s.Pool.Check()
	}
	var u pool.Usage
	if err == nil {
		u, err = s.Pool.Usage()
	}
	var entries []pool.Entry
	if err == nil {
		p.UUID = s.Pool.ShortUUID()
		reportUsage(&p, u)
		entries, err = s.Pool.Entries()
	}
	if err != nil {
		p.Problem = err.Error()
	}
	volumes := make([]status.Volume, 0, len(entries))
	for _, e := range entries {
		volumes = append(volumes, d.reportEntry(ctx, p, e, mounts))
	}
	return p, volumes
}

func reportUsage(p *status.Pool, u pool.Usage) {
	p.SizeBytes, p.UsedBytes, p.FreeBytes = u.Total, u.Used, u.Free
	p.PromisedBytes, p.RoomBytes, p.LargestBytes, p.ReserveBytes = u.Promised, u.Room, u.Largest, u.Reserve
	p.Volumes, p.Snapshots, p.Copies = u.Volumes, u.Snapshots, u.Copies
	p.Trash, p.TrashStuck = u.Trash, u.TrashStuck
}

// reportEntry returns the state of a volume in a pool of this node. mounts is the mount table.
func (d *Driver) reportEntry(ctx context.Context, p status.Pool, e pool.Entry, mounts []*mount.Entry) status.Volume {
	out := status.OfEntry(p.Name, e)
	out.Node = p.Node
	v := e.Volume
	if v.Version == 0 { // no readable record
		out.Health = []status.Health{{Status: csi.VolumeHealthErrorType_DATA_LOSS.String(), Reason: string(backend.ReasonRecordDamaged), Message: fmt.Sprint(e.Err)}}
		return out
	}
	b, err := d.backends.ByName(v.ID.Backend)
	if err != nil {
		return out
	}
	device, staged := present(ctx, b, v, mounts)
	out.Device, out.Staged = cmp.Or(out.Device, device), staged
	out.NoLiveSnapshots = !backend.LiveSnapshots(b, v)
	if d.sender != nil {
		out.SentAs = d.sender.SentAs(v.ID)
	}
	if s, err := blockdev.ReadIOStat(out.Device); err == nil {
		out.IO = &status.IO{Reads: s.Reads, ReadBytes: s.ReadBytes, Writes: s.Writes, WrittenBytes: s.WrittenBytes, BusySeconds: float64(s.BusyMilliseconds) / 1000}
	}
	return out
}

// present returns the path of the device of a volume that is attached to this node, or "", and whether the volume
// is staged: attached, or for a volume without a device, in the mount table. If this is not known, it counts as staged, because a
// move takes the last snapshot of a volume that is not staged.
func present(ctx context.Context, b backend.Backend, v volume.Volume, mounts []*mount.Entry) (device string, staged bool) {
	source, ok, err := b.Present(ctx, v)
	if err != nil || !ok {
		return "", err != nil
	}
	defer func() { _ = source.Close() }()
	if device, ok := source.(mount.BlockDevice); ok {
		return device.Node(), true
	}
	matches, err := source.Matcher(mounts)
	return "", err != nil || slices.ContainsFunc(mounts, matches)
}

// reportLists adds the volumes of nfs pools, the snapshots, and the health of all volumes.
func (d *Driver) reportLists(ctx context.Context, r *status.Report) error {
	if d.options.serves("controller") {
		r.Pools = append(r.Pools, sharedPools(d.workers.States())...)
		volumes, err := relay.Volumes.All(ctx, d.lists)
		if err != nil {
			return err
		}
		for _, e := range volumes {
			if id, err := volume.ParseID(e.GetVolume().GetVolumeId()); err == nil && id.Shared() {
				r.Volumes = append(r.Volumes, status.Volume{
					ID: id.String(), Name: id.Name, Pool: id.Pool, Backend: id.Backend,
					SizeBytes: e.GetVolume().GetCapacityBytes(), UsedBytes: -1, PublishedTo: e.GetStatus().GetPublishedNodeIds(),
				})
			}
		}
	}
	snapshots, err := relay.Snapshots.All(ctx, d.lists)
	if err != nil {
		return err
	}
	for _, e := range snapshots {
		r.Snapshots = append(r.Snapshots, d.reportSnapshot(e.GetSnapshot()))
	}
	health, err := relay.VolumeHealths.All(ctx, d.lists)
	if err != nil {
		return err
	}
	var listed status.Examination
	for _, h := range health {
		listed.Volumes = append(listed.Volumes, healthOf(h))
	}
	r.AddHealth(d.options.NodeID, listed)
	return nil
}

// sharedPools returns the nfs pools in the state that their workers have reported last.
func sharedPools(states []export.State) []status.Pool {
	pools := make([]status.Pool, 0, len(states))
	for _, s := range states {
		p := status.Pool{Name: s.Pool}
		if s.Report != nil {
			reportUsage(&p, s.Report.Usage)
			p.Problem = s.Report.Err
		}
		if !s.Answers {
			p.Problem = "the NFS server " + s.Server + " does not answer"
		}
		pools = append(pools, p)
	}
	return pools
}

func (d *Driver) reportSnapshot(s *csi.Snapshot) status.Snapshot {
	out := status.Snapshot{
		ID: s.GetSnapshotId(), Source: s.GetSourceVolumeId(), Group: s.GetGroupSnapshotId(),
		SizeBytes: s.GetSizeBytes(), Created: s.GetCreationTime().AsTime(),
	}
	if id, err := volume.ParseSnapshotID(out.ID); err == nil {
		out.Pool = id.Pool
		if !id.Shared() {
			out.Node = d.options.NodeID
		}
	}
	return out
}

// healthOf converts the conditions of a volume.
func healthOf(h *csi.VolumeHealth) status.Examined {
	out := status.Examined{ID: h.GetVolumeId()}
	for _, e := range h.GetHealthStatuses() {
		out.Health = append(out.Health, status.Health{Status: e.GetStatus().String(), Reason: e.GetReason(), Message: e.GetMessage()})
	}
	return out
}

// callsServed returns the calls of this process by method.
func (m *metrics) callsServed() []status.Call {
	families, _ := m.calls.Gather() // fails only if collectors contradict each other
	byMethod := map[string]*status.Call{}
	for _, f := range families {
		for _, sample := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range sample.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			method := labels["method_name"]
			c := byMethod[method]
			if c == nil {
				c = &status.Call{Method: path.Base(method)}
				byMethod[method] = c
			}
			if h := sample.GetHistogram(); h != nil {
				c.Count += h.GetSampleCount()
				c.TotalSeconds += h.GetSampleSum()
				if labels["grpc_status_code"] != codes.OK.String() {
					c.Failed += h.GetSampleCount()
				}
				continue
			}
			c.Running = int(sample.GetGauge().GetValue())
		}
	}
	calls := make([]status.Call, 0, len(byMethod))
	for _, method := range slices.Sorted(maps.Keys(byMethod)) {
		calls = append(calls, *byMethod[method])
	}
	return calls
}
