package move

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/internal/translate"
)

// Drain is what a drain of a node will do.
type Drain struct {
	Moves     []PlannedMove
	Unmovable []Unmovable
	// Copies are the copies of protections, as namespace/name. They are not moved.
	Copies []string
}

// PlannedMove is the move of a claim, as planned before the drain begins.
type PlannedMove struct {
	*Mover
	// Plan is empty for a move that has begun.
	Plan Plan
}

// Unmovable is a claim that cannot be moved.
type Unmovable struct {
	Claim  string // namespace/name
	Reason error
}

// Name returns the claim as namespace/name.
func (p PlannedMove) Name() string { return p.Namespace + "/" + p.ClaimName }

// Move plans the move again, because earlier moves take time, and moves the volume. It continues a move that has begun.
func (p PlannedMove) Move(ctx context.Context) error {
	m, err := New(ctx, p.api, p.Options)
	if err != nil {
		return err
	}
	if m.Begun() != "" {
		m.To = m.state.To
		return m.Resume(ctx)
	}
	report, err := p.api.Report(ctx)
	if err != nil {
		return err
	}
	plan, err := m.Plan(ctx, report)
	if err != nil {
		return err
	}
	return m.Start(ctx, plan)
}

// PlanDrain plans the moves of all claims whose volumes only one node has. Without Options.To, each claim is moved to the node
// with the most room of those to which it can be moved. report is the report of the drivers.
func PlanDrain(ctx context.Context, cluster *kubectl.Cluster, report status.Report, node string, o Options) (d Drain, err error) {
	if _, err := cluster.Node(ctx, node); err != nil {
		return d, err
	}
	if d, err = begunMoves(ctx, cluster, node, o); err != nil {
		return d, err
	}
	volumes, err := cluster.PersistentVolumes(ctx, report.Driver)
	if err != nil {
		return d, err
	}
	report.Pools = slices.Clone(report.Pools) // planClaim changes their room
	for _, v := range volumes {
		name := v.Spec.ClaimRef.Namespace + "/" + v.Spec.ClaimRef.Name
		if v.OnlyNode(translate.TopologyKey) != node || v.Status.Phase != "Bound" || slices.ContainsFunc(d.Moves, func(m PlannedMove) bool { return m.Name() == name }) {
			continue
		}
		isCopy, err := copyOfProtection(ctx, cluster, report, v)
		if err != nil {
			return d, err
		}
		if isCopy {
			d.Copies = append(d.Copies, name)
			continue
		}
		move, reason := planClaim(ctx, cluster, report, v, o)
		if ctx.Err() != nil {
			return d, ctx.Err()
		}
		if reason != nil {
			d.Unmovable = append(d.Unmovable, Unmovable{name, reason})
			continue
		}
		d.Moves = append(d.Moves, move)
	}
	return d, nil
}

// copyOfProtection reports whether a volume is a copy of a protection: its claim has the label, and the driver reports that it is an
// unchanged copy. Users who can write claims can write the label.
func copyOfProtection(ctx context.Context, cluster *kubectl.Cluster, report status.Report, v kube.PersistentVolume) (bool, error) {
	if !slices.ContainsFunc(report.Volumes, func(r status.Volume) bool { return r.ID == v.Spec.CSI.VolumeHandle && r.CopyOf != "" }) {
		return false, nil
	}
	claim, err := cluster.Claim(ctx, v.Spec.ClaimRef.Namespace, v.Spec.ClaimRef.Name)
	return err == nil && claim.Metadata.Labels[protectLabel] != "", absent(err)
}

// begunMoves returns the moves from a node that are not complete. Their claims may have no PersistentVolume, or one on another
// node. It ignores a state that cannot be read: New returns the error for its claim.
func begunMoves(ctx context.Context, cluster *kubectl.Cluster, node string, o Options) (d Drain, err error) {
	records, err := cluster.ConfigMaps(ctx, cluster.Namespace, moveLabel)
	for _, record := range records {
		s, err := readState(record)
		if err != nil || s.From != node {
			continue
		}
		o.Namespace, o.ClaimName = s.Namespace, s.Claim
		m, err := New(ctx, cluster, o)
		if err == nil && m.state.ID != s.ID {
			err = fmt.Errorf("the claim was deleted and created again during its move: delete ConfigMap %s/%s, and the PersistentVolumes of move %s that are not needed", record.Metadata.Namespace, record.Metadata.Name, s.ID)
		}
		if err == nil {
			err = m.checkCommand()
		}
		if ctx.Err() != nil {
			return d, ctx.Err()
		}
		if err != nil {
			d.Unmovable = append(d.Unmovable, Unmovable{s.Namespace + "/" + s.Claim, err})
			continue
		}
		d.Moves = append(d.Moves, PlannedMove{Mover: m})
	}
	return d, err
}

// planClaim plans the move of the claim of a volume. It subtracts the size of the volume from the room of the pools to which it
// may be moved.
func planClaim(ctx context.Context, cluster *kubectl.Cluster, report status.Report, v kube.PersistentVolume, o Options) (p PlannedMove, err error) {
	o.Namespace, o.ClaimName = v.Spec.ClaimRef.Namespace, v.Spec.ClaimRef.Name
	if p.Mover, err = New(ctx, cluster, o); err != nil {
		return p, err
	}
	from := v.OnlyNode(translate.TopologyKey)
	err = errors.New("no other node has a pool that is open")
	for _, to := range destinations(report, from, o.To) {
		p.To = to
		if p.Plan, err = p.Mover.Plan(ctx, report); err == nil {
			reserve(report, to, p.Plan.SizeBytes)
			return p, nil
		}
	}
	return p, err
}

// destinations returns the nodes to which volumes can be moved, first those with the most room.
func destinations(report status.Report, from, only string) (names []string) {
	if only != "" {
		return []string{only}
	}
	room := map[string]int64{}
	for _, p := range report.Pools {
		if p.Node != "" && p.Node != from && p.Problem == "" {
			room[p.Node] = max(room[p.Node], p.RoomBytes)
		}
	}
	for name := range room {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(cmp.Compare(room[b], room[a]), cmp.Compare(a, b)) })
	return names
}

// reserve subtracts a size from the room of the pools of a node.
func reserve(report status.Report, node string, size int64) {
	for i := range report.Pools {
		if p := &report.Pools[i]; p.Node == node {
			p.RoomBytes -= size
		}
	}
}
