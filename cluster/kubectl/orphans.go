package kubectl

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"sigs.k8s.io/yaml"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// The kinds of Orphan.
const (
	OrphanedVolume           = "volume"
	OrphanedSnapshot         = "snapshot"
	OrphanedPersistentVolume = "PersistentVolume"
	OrphanedSnapshotContent  = "VolumeSnapshotContent"
)

// Orphan is a volume or a snapshot without its object in Kubernetes, or such an object without its volume or
// snapshot.
type Orphan struct {
	Kind string `json:"kind"`
	// Name is the ID of a volume or snapshot, or the name of an object.
	Name      string `json:"name"`
	Pool      string `json:"pool,omitempty"`
	Node      string `json:"node,omitempty"`
	SizeBytes int64  `json:"sizeBytes,omitempty"`
	Reason    string `json:"reason"`
	// CleanUp is the command that removes the orphan, or the page with the steps.
	CleanUp string `json:"cleanUp"`
}

// Orphans returns the orphans. It does not examine what is missing in the report (Report.Missing).
func (c *Cluster) Orphans(ctx context.Context, r status.Report) ([]Orphan, error) {
	volumes, err := c.PersistentVolumes(ctx, r.Driver)
	if err != nil {
		return nil, needs(err, "list persistentvolumes")
	}
	contents, err := c.SnapshotContents(ctx, r.Driver)
	if err != nil {
		return nil, needs(err, "list volumesnapshotcontents")
	}
	return findOrphans(r, volumes, contents), nil
}

func findOrphans(r status.Report, volumes []kube.PersistentVolume, contents []kube.SnapshotContent) (orphans []Orphan) {
	complete := completePools(r)
	handles := map[string]bool{}
	for _, v := range volumes {
		handles[v.Spec.CSI.VolumeHandle] = true
	}
	existing := map[string]bool{}
	for _, v := range r.Volumes {
		existing[v.ID] = true
		// Inline volumes and those of FlexVolume have no PersistentVolume, and an unlisted volume may be one of them. A volume that is
		// being received has none yet.
		if v.ID != "" && !v.Unlisted && v.Pod == "" && v.Namespace == "" && v.State != status.StateReceiving && !handles[v.ID] {
			orphans = append(orphans, Orphan{
				Kind: OrphanedVolume, Name: v.ID, Pool: v.Pool, Node: v.Node, SizeBytes: v.SizeBytes,
				Reason: "no PersistentVolume has its handle", CleanUp: deleteCommand(v.ID),
			})
		}
	}
	for _, v := range volumes {
		id, err := volume.ParseID(v.Spec.CSI.VolumeHandle)
		if err != nil || existing[id.String()] { // a static volume has no ID of a pool
			continue
		}
		o := Orphan{Kind: OrphanedPersistentVolume, Name: v.Metadata.Name, Pool: id.Pool}
		switch readable, known := complete[poolOf(id)]; {
		case readable:
			o.Reason = fmt.Sprintf("pool %s has no volume %s", id.Pool, id)
			o.CleanUp = "kubectl delete persistentvolume " + v.Metadata.Name
		case !known && !id.Shared() && len(r.Missing()) == 0:
			o.Node = v.OnlyNode(translate.TopologyKey)
			o.Reason = fmt.Sprintf("no node has pool %s with the UUID %s", id.Pool, id.PoolUUID)
			if o.Node != "" {
				o.Reason += "; it was on node " + o.Node
			}
			o.CleanUp = "if its disk is lost, see docs/operations/nodes.md"
		default:
			continue
		}
		orphans = append(orphans, o)
	}
	return append(orphans, findOrphanedSnapshots(r, contents, complete)...)
}

func findOrphanedSnapshots(r status.Report, contents []kube.SnapshotContent, complete map[pool]bool) (orphans []Orphan) {
	handles, existing := map[string]bool{}, map[string]bool{}
	for _, c := range contents {
		handles[c.Handle()] = true
	}
	for _, s := range r.Snapshots {
		existing[s.ID] = true
		if !handles[s.ID] {
			orphans = append(orphans, Orphan{
				Kind: OrphanedSnapshot, Name: s.ID, Pool: s.Pool, Node: s.Node, SizeBytes: s.SizeBytes,
				Reason: "no VolumeSnapshotContent has its handle", CleanUp: deleteCommand(s.ID),
			})
		}
	}
	for _, c := range contents {
		id, err := volume.ParseSnapshotID(c.Handle())
		if err != nil || existing[c.Handle()] || !complete[poolOf(id)] { // it may not be created yet
			continue
		}
		orphans = append(orphans, Orphan{
			Kind: OrphanedSnapshotContent, Name: c.Metadata.Name, Pool: id.Pool,
			Reason:  fmt.Sprintf("pool %s has no snapshot %s", id.Pool, id),
			CleanUp: "kubectl delete volumesnapshotcontent " + c.Metadata.Name,
		})
	}
	return orphans
}

// deleteCommand returns the command that deletes a volume or snapshot through the driver.
func deleteCommand(id string) string {
	return fmt.Sprintf("kubectl trivet orphans --manifest '%s' | kubectl create -f -", id)
}

// pool identifies a pool. An nfs pool has no UUID.
type pool struct{ name, uuid string }

func poolOf(id volume.ID) pool { return pool{id.Pool, id.PoolUUID} }

// completePools returns the pools whose volumes and snapshots are all in the report. A pool that two nodes report
// is not one of them.
func completePools(r status.Report) map[pool]bool {
	complete := map[pool]bool{}
	for _, p := range r.Pools {
		key := pool{p.Name, p.UUID}
		_, seen := complete[key]
		process := slices.IndexFunc(r.Processes, func(d status.Process) bool { return d.Node == p.Node })
		complete[key] = !seen && p.Problem == "" && process >= 0 && r.Processes[process].Problem == ""
	}
	return complete
}

// Manifest returns an object of Kubernetes in YAML whose creation makes the sidecars delete an orphaned volume or
// snapshot: a PersistentVolume whose claim does not exist, or a VolumeSnapshotContent without a VolumeSnapshot.
// Both have the policy Delete.
func Manifest(driver string, o Orphan) (string, error) {
	var object map[string]any
	switch o.Kind {
	case OrphanedVolume:
		object = map[string]any{
			"apiVersion": "v1", "kind": "PersistentVolume",
			"metadata": map[string]any{
				"name": objectName(o.Name), "annotations": map[string]any{"pv.kubernetes.io/provisioned-by": driver},
			},
			"spec": map[string]any{
				"accessModes": []string{"ReadWriteOnce"}, "capacity": map[string]any{"storage": fmt.Sprint(o.SizeBytes)},
				"persistentVolumeReclaimPolicy": "Delete", "storageClassName": "",
				// A claim with this UID has never existed, so Kubernetes releases the PersistentVolume.
				"claimRef": map[string]any{"namespace": "default", "name": objectName(o.Name), "uid": uuid.NewString()},
				"csi":      map[string]any{"driver": driver, "volumeHandle": o.Name},
			},
		}
	case OrphanedSnapshot:
		object = map[string]any{
			"apiVersion": "snapshot.storage.k8s.io/v1", "kind": "VolumeSnapshotContent",
			"metadata": map[string]any{"name": objectName(o.Name)},
			"spec": map[string]any{
				"driver": driver, "deletionPolicy": "Delete", "source": map[string]any{"snapshotHandle": o.Name},
				"volumeSnapshotRef": map[string]any{"namespace": "default", "name": objectName(o.Name), "uid": uuid.NewString()},
			},
		}
	default:
		return "", fmt.Errorf("%s %q: it is an object of Kubernetes: run %s", o.Kind, o.Name, o.CleanUp)
	}
	text, err := yaml.Marshal(object)
	return string(text), err
}

// objectName returns the name of the object that represents an orphan.
func objectName(id string) string {
	sum := sha256.Sum256([]byte(id))
	return "trivet-orphan-" + hex.EncodeToString(sum[:8])
}
