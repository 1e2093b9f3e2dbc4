package status

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

// view is the data of the page.
type view struct {
	Report
	Nonce     string
	Problems  []problem
	Pools     []poolView
	Volumes   []volumeView
	Running   []runningCall
	NodesUp   int
	Nodes     int
	Size      int64
	Promised  int64
	UsedBytes int64
}

// problem is one line of the list of problems.
type problem struct{ Where, What string }

// poolView is a pool with its bar.
type poolView struct {
	Pool
	Bar Bar
}

// volumeView is a volume with its bar and the number of its snapshots.
type volumeView struct {
	Volume
	Bar       Bar
	Used      string
	Snapshots int
	Worst     string
}

// runningCall is a method with running calls.
type runningCall struct {
	Node   string
	Method string
	Calls  int
}

// Bar divides a size into used, promised and other space. Its parts are percentages that sum up to at most 100.
type Bar struct{ Used, Promised float64 }

// PoolBar returns the bar of a pool: the used space, and the promised space beyond it.
func PoolBar(p Pool) Bar {
	used := percent(p.UsedBytes, p.SizeBytes)
	return Bar{Used: used, Promised: max(0, percent(p.PromisedBytes, p.SizeBytes)-used)}
}

// percent returns part as a percentage of whole, between 0 and 100.
func percent(part, whole int64) float64 {
	if whole <= 0 || part <= 0 {
		return 0
	}
	return min(100, 100*float64(part)/float64(whole))
}

// problems returns the problems of processes, pools and volumes.
func (r Report) problems() (all []problem) {
	for _, p := range r.Processes {
		if p.Problem != "" {
			all = append(all, problem{p.Name(), p.Problem})
		}
		if left := time.Until(p.CertificateExpires); !p.CertificateExpires.IsZero() && left < 0 {
			all = append(all, problem{p.Name(), fmt.Sprintf("its certificate expired at %s", p.CertificateExpires.Format(time.RFC3339))})
		}
	}
	for _, p := range r.Pools {
		where := "pool " + p.Name + on(p.Node)
		switch {
		case p.Problem != "":
			all = append(all, problem{where, p.Problem})
		case p.FreeBytes < p.ReserveBytes:
			all = append(all, problem{where, fmt.Sprintf("%s free, less than the reserve of %s: free space or enlarge the filesystem", volume.FormatSize(p.FreeBytes), volume.FormatSize(p.ReserveBytes))})
		}
		if p.TrashStuck > 0 {
			all = append(all, problem{where, fmt.Sprintf("%d deleted volumes or snapshots could not be removed", p.TrashStuck)})
		}
	}
	for _, v := range r.Volumes {
		for _, h := range v.Health {
			where := "volume " + cmp.Or(v.Name, v.ID) + on(v.Node)
			if claim := v.ClaimText(); claim != "" {
				where += " of " + claim
			}
			all = append(all, problem{where, h.Reason + ": " + h.Message})
		}
	}
	return all
}

// Name returns the name of the node, or "controller".
func (p Process) Name() string { return cmp.Or(p.Node, "controller") }

func on(node string) string {
	if node == "" {
		return ""
	}
	return " on " + node
}

// Missing returns the reasons why volumes or snapshots may be missing in the report: processes that did not report
// or are not ready, and pools that are not open.
func (r Report) Missing() (reasons []string) {
	for _, p := range r.Processes {
		for line := range strings.Lines(p.Problem) {
			problem := strings.TrimSpace(line)
			ofPool := func(other Pool) bool { return other.Node == p.Node && other.Problem == problem }
			if !slices.ContainsFunc(r.Pools, ofPool) { // a process also reports the problems of its pools
				reasons = append(reasons, p.Name()+": "+problem)
			}
		}
	}
	for _, p := range r.Pools {
		if p.Problem != "" {
			reasons = append(reasons, "pool "+p.Name+on(p.Node)+": "+p.Problem)
		}
	}
	return reasons
}

// SnapshotCounts returns the number of snapshots by the ID of their volume.
func (r Report) SnapshotCounts() map[string]int {
	counts := map[string]int{}
	for _, s := range r.Snapshots {
		counts[s.Source]++
	}
	return counts
}

// worstFirst are the values of Health.Status from the worst to the mildest.
var worstFirst = []string{"DATA_LOSS", "INACCESSIBLE", "DEGRADED"}

// InUseOn returns the nodes that use the volume: its node if it is staged there, else those to which it is published.
func (v Volume) InUseOn() []string {
	if v.Staged {
		return []string{v.Node}
	}
	return v.PublishedTo
}

// ClaimText returns the claim, and the phase of its PersistentVolume unless that is bound to the claim.
func (v Volume) ClaimText() string {
	if v.Claim == "" || v.Phase == "Bound" {
		return v.Claim
	}
	return v.Claim + " (" + v.Phase + ")"
}

// Worst returns the most severe status of the volume, or "ok".
func (v Volume) Worst() string {
	for _, s := range worstFirst {
		if slices.ContainsFunc(v.Health, func(h Health) bool { return h.Status == s }) {
			return s
		}
	}
	return "ok"
}

func newView(r Report, nonce string) view {
	v := view{Report: r, Nonce: nonce, Problems: r.problems()}
	for _, p := range r.Processes {
		if p.Node != "" {
			v.Nodes++
			if p.Version != "" { // it has reported
				v.NodesUp++
			}
		}
		for _, c := range p.Calls {
			if c.Running > 0 {
				v.Running = append(v.Running, runningCall{p.Name(), c.Method, c.Running})
			}
		}
	}
	for _, p := range r.Pools {
		v.Pools = append(v.Pools, poolView{p, PoolBar(p)})
		v.Size += p.SizeBytes
		v.Promised += p.PromisedBytes
		v.UsedBytes += p.UsedBytes
	}
	snapshots := r.SnapshotCounts()
	for _, own := range r.Volumes {
		used := "unknown"
		if own.UsedBytes >= 0 {
			used = volume.FormatSize(own.UsedBytes)
		}
		v.Volumes = append(v.Volumes, volumeView{own, Bar{Used: percent(own.UsedBytes, own.SizeBytes)}, used, snapshots[own.ID], own.Worst()})
	}
	return v
}
