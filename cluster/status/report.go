// Package status describes the state of drivers, pools, volumes and snapshots, for people: the driver of each
// node reports its own state, and the controller's driver merges the reports of all nodes. The package serves
// the report as JSON and as a page, to clients on the same machine only (Handle), and transfers it between
// drivers (Register, Fetch). Package driver collects the report.
//
// The controller does not trust the reports of nodes: From keeps only what concerns the node.
package status

import (
	"slices"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Report is the state of one driver, or of all drivers of a cluster. Sizes are bytes.
type Report struct {
	Time time.Time `json:"time"`
	// Driver is the name of the CSI driver.
	Driver    string     `json:"driver"`
	Processes []Process  `json:"processes"`
	Pools     []Pool     `json:"pools"`
	Volumes   []Volume   `json:"volumes"`
	Snapshots []Snapshot `json:"snapshots"`
}

// Process is a driver process.
type Process struct {
	// Node is the node that the process serves. It is empty for the controller's driver.
	Node    string `json:"node,omitempty"`
	Version string `json:"version,omitempty"`
	// Problem is the reason why the process did not report, or why it is not ready.
	Problem string `json:"problem,omitempty"`
	// CertificateExpires is zero if the process has no certificate.
	CertificateExpires time.Time `json:"certificateExpires,omitzero"`
	Calls              []Call    `json:"calls,omitempty"`
}

// Call is a CSI method with the calls that a process has served since it started.
type Call struct {
	Method  string `json:"method"`
	Running int    `json:"running"`
	// Count is the number of completed calls, Failed the number of those that failed, and TotalSeconds
	// the sum of their durations.
	Count        uint64  `json:"count"`
	Failed       uint64  `json:"failed"`
	TotalSeconds float64 `json:"totalSeconds"`
}

// Pool is a pool of a node, or an nfs pool, which has no node.
type Pool struct {
	Name string `json:"name"`
	// UUID is the part of the pool's UUID that the IDs of its volumes contain. It is empty for a pool
	// that is not open, and for an nfs pool.
	UUID    string `json:"uuid,omitempty"`
	Node    string `json:"node,omitempty"`
	Problem string `json:"problem,omitempty"`

	SizeBytes     int64 `json:"sizeBytes"`
	UsedBytes     int64 `json:"usedBytes"`
	FreeBytes     int64 `json:"freeBytes"`
	PromisedBytes int64 `json:"promisedBytes"`
	// RoomBytes is the space for volumes, and LargestBytes the size of the largest one.
	RoomBytes    int64 `json:"roomBytes"`
	LargestBytes int64 `json:"largestBytes"`
	ReserveBytes int64 `json:"reserveBytes"`
	Volumes      int   `json:"volumes"`
	Snapshots    int   `json:"snapshots"`
	// Trash is the number of deleted volumes and snapshots that are not removed yet. TrashStuck is the
	// number of those whose removal failed.
	Trash      int `json:"trash"`
	TrashStuck int `json:"trashStuck"`
	Copies     int `json:"copies"`
}

// Volume is a volume, or an entry of a pool that cannot be read.
type Volume struct {
	ID string `json:"id,omitempty"`
	// Name is the name that the container orchestrator gave the volume.
	Name    string `json:"name,omitempty"`
	Pool    string `json:"pool"`
	Node    string `json:"node,omitempty"`
	Backend string `json:"backend,omitempty"`
	// UsedBytes is the space that the volume takes. It is -1 if it is unknown.
	SizeBytes int64 `json:"sizeBytes"`
	UsedBytes int64 `json:"usedBytes"`
	// Content is the filesystem, `block` or `directory`.
	Content string `json:"content,omitempty"`
	// SubDir is the path of the volume's directory in the pool, if its StorageClass sets subDir.
	SubDir string `json:"subDir,omitempty"`
	// State is the progress of formatting, or StateReceiving.
	State string `json:"state,omitempty"`
	// CopyOf is the ID of the volume of another node of which this volume is an unchanged copy: it was received from a snapshot, and
	// never staged. Snapshotted is the time of that snapshot.
	CopyOf      string    `json:"copyOf,omitempty"`
	Snapshotted time.Time `json:"snapshotted,omitzero"`
	// PublishedTo are the nodes to which the volume is controller-published. A central controller records this only
	// for volumes of nfs pools.
	PublishedTo []string `json:"publishedTo,omitempty"`
	// Staged is true if the volume is mounted on its node, or attached to it as a device. It is known for volumes of
	// the node's own pools.
	Staged bool `json:"staged,omitempty"`
	// NoLiveSnapshots is true if no snapshot of the volume can be taken while it is in use. It is known for volumes of the node's own
	// pools.
	NoLiveSnapshots bool `json:"noLiveSnapshots,omitempty"`
	// SentAs are the names of the new volumes of other nodes to which the volume is being sent now. A volume without live snapshots
	// is not staged, and cannot be staged meanwhile.
	SentAs []string `json:"sentAs,omitempty"`
	// Pod is the namespace/name of the pod that an inline volume belongs to.
	Pod string `json:"pod,omitempty"`
	// Namespace is the namespace whose pods may mount the volume by FlexVolume.
	Namespace string `json:"namespace,omitempty"`
	// Claim is the namespace/name of the claim, and Phase the phase of its PersistentVolume. The claim of a
	// PersistentVolume that is Released no longer exists. Drivers do not know both: kubectl trivet adds them.
	Claim  string   `json:"claim,omitempty"`
	Phase  string   `json:"persistentVolumePhase,omitempty"`
	Device string   `json:"device,omitempty"`
	IO     *IO      `json:"io,omitempty"`
	Health []Health `json:"health,omitempty"`
	// Problem is the reason why the entry, or the pool if there is no name, could not be read.
	Problem string `json:"problem,omitempty"`
	// Unlisted is true if only an examination has reported the volume: its pool could not be read, so only the ID and the health are
	// known. It may be an inline or a FlexVolume volume.
	Unlisted bool `json:"unlisted,omitempty"`
}

// StateReceiving is the state of a volume that does not exist yet, because its content is being received from another node.
const StateReceiving = pool.Receiving

// OfEntry returns the state of an entry of a pool that the disk contains.
func OfEntry(poolName string, e pool.Entry) Volume {
	out := Volume{Pool: poolName, Name: e.Name, UsedBytes: e.Used, PublishedTo: e.Nodes, Device: e.Device}
	if e.Err != nil {
		out.Problem = e.Err.Error()
	}
	v := e.Volume
	if v.Version == 0 { // no readable record
		return out
	}
	out.ID, out.Name, out.Backend, out.SizeBytes = v.ID.String(), v.CoName, v.ID.Backend, v.Capacity
	out.Namespace, out.Content, out.State = v.Namespace, v.Content(), e.Progress()
	if e.CopyOf != (volume.ID{}) {
		out.CopyOf, out.Snapshotted = e.CopyOf.String(), e.Snapshotted
	}
	if v.Ephemeral != nil {
		out.Pod = v.Ephemeral.Pod.Namespace + "/" + v.Ephemeral.Pod.Name
	}
	if v.Directory != nil {
		out.SubDir = v.Directory.SubDir
	}
	return out
}

// IO counts the I/O of a volume's device since the kernel created the device. A loop device or a disk keeps its
// counters when it is used for another volume, so only differences between two reports concern the volume.
type IO struct {
	Reads        uint64 `json:"reads"`
	ReadBytes    uint64 `json:"readBytes"`
	Writes       uint64 `json:"writes"`
	WrittenBytes uint64 `json:"writtenBytes"`
	// BusySeconds is the time during which the device had requests.
	BusySeconds float64 `json:"busySeconds"`
}

// Health is an adverse condition of a volume.
type Health struct {
	// Status is a VolumeHealthErrorType of the CSI specification.
	Status  string `json:"status"`
	Reason  string `json:"reason"`
	Message string `json:"message,omitempty"`
}

// Examination is the result of the last examination of the volumes of a node: those in its pools, and those of NFS
// servers that are staged on it.
type Examination struct {
	// Volumes are the volumes with adverse conditions.
	Volumes []Examined `json:"volumes,omitempty"`
	// Unexamined are the names of the pools some of whose volumes could not be examined.
	Unexamined []string `json:"unexamined,omitempty"`
}

// Examined is a volume with adverse conditions.
type Examined struct {
	ID     string   `json:"id"`
	Health []Health `json:"health"`
}

// AddHealth adds the conditions of an examination to the volumes, unless they have a condition with the same reason. It adds
// the volumes that the report lacks, because their pool cannot be read.
func (r *Report) AddHealth(node string, e Examination) {
	if len(e.Volumes) == 0 {
		return
	}
	at := map[string]int{}
	for i, v := range r.Volumes {
		at[v.ID] = i
	}
	for _, found := range e.Volumes {
		i, ok := at[found.ID]
		if !ok {
			i = len(r.Volumes)
			r.Volumes, at[found.ID] = append(r.Volumes, unlisted(node, found.ID)), i
		}
		v := &r.Volumes[i]
		for _, h := range found.Health {
			if !slices.ContainsFunc(v.Health, func(have Health) bool { return have.Reason == h.Reason }) {
				v.Health = append(v.Health, h)
			}
		}
	}
}

// unlisted returns a volume of which only the ID is known. node is the node of its pool.
func unlisted(node, text string) Volume {
	v := Volume{ID: text, Name: text, UsedBytes: -1, Unlisted: true}
	if id, err := volume.ParseID(text); err == nil {
		v.Name, v.Pool, v.Backend = id.Name, id.Pool, id.Backend
		if !id.Shared() {
			v.Node = node
		}
	}
	return v
}

// Snapshot is a snapshot, or a member of a group snapshot.
type Snapshot struct {
	ID        string    `json:"id"`
	Source    string    `json:"source"`
	Group     string    `json:"group,omitempty"`
	Pool      string    `json:"pool"`
	Node      string    `json:"node,omitempty"`
	SizeBytes int64     `json:"sizeBytes"`
	Created   time.Time `json:"created"`
}

// From returns the part of a node's report that the controller accepts: one process, the pools and what is in
// them. serves reports whether a pool belongs to the node.
func (r Report) From(node string, serves func(pool, uuid string) bool) Report {
	kept := Report{Time: r.Time, Driver: r.Driver, Processes: []Process{{Node: node}}}
	if len(r.Processes) == 1 {
		kept.Processes[0] = r.Processes[0]
		kept.Processes[0].Node = node
	}
	uuids := map[string]string{} // of the pools that the node serves
	for _, p := range r.Pools {
		switch {
		case p.UUID != "" && serves(p.Name, p.UUID):
			uuids[p.Name] = p.UUID
		case p.UUID != "":
			p.Problem = "the controller has not recorded this node for the pool: the pool is new, or another node has or also announces it"
		}
		p.Node = node
		kept.Pools = append(kept.Pools, p)
	}
	// An entry that cannot be read has no ID.
	in := func(pool, text string) bool {
		id, err := volume.ParseID(text)
		return uuids[pool] != "" && (text == "" || err == nil && id.Pool == pool && id.PoolUUID == uuids[pool])
	}
	for _, v := range r.Volumes {
		if in(v.Pool, v.ID) {
			v.Node, v.Claim, v.Phase = node, "", ""
			kept.Volumes = append(kept.Volumes, v)
		}
	}
	for _, s := range r.Snapshots {
		if in(s.Pool, s.Source) {
			s.Node = node
			kept.Snapshots = append(kept.Snapshots, s)
		}
	}
	return kept
}

// Add adds another report.
func (r *Report) Add(o Report) {
	r.Processes = append(r.Processes, o.Processes...)
	r.Pools = append(r.Pools, o.Pools...)
	r.Volumes = append(r.Volumes, o.Volumes...)
	r.Snapshots = append(r.Snapshots, o.Snapshots...)
}

// Sort orders each list by node and pool, then by name.
func (r *Report) Sort() {
	slices.SortFunc(r.Processes, func(a, b Process) int { return strings.Compare(a.Node, b.Node) })
	slices.SortFunc(r.Pools, func(a, b Pool) int { return compare(a.Node, b.Node, a.Name, b.Name) })
	slices.SortFunc(r.Volumes, func(a, b Volume) int { return compare(a.Node, b.Node, a.Pool, b.Pool, a.Name, b.Name, a.ID, b.ID) })
	slices.SortFunc(r.Snapshots, func(a, b Snapshot) int { return compare(a.Node, b.Node, a.Pool, b.Pool, a.ID, b.ID) })
}

// compare compares pairs of strings. The first pair that differs decides.
func compare(pairs ...string) int {
	for i := 0; i < len(pairs); i += 2 {
		if c := strings.Compare(pairs[i], pairs[i+1]); c != 0 {
			return c
		}
	}
	return 0
}
