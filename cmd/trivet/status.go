package main

import (
	"context"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/volume"
	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/claim"
	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins/csi"
	"github.com/trivet-csi/trivet/volumemanager/reconciler"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

func newVolumeStatusCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the volumes and their problems",
		Long: `Shows the volumes, claims, persistent volumes, drivers, problems of manifests, and the
last events of the running volume manager, each with the remedy. Empty tables are
omitted. Tables contain the last 20 events, JSON and YAML up to 500.

The phase of a volume is Pending, Attaching, Mounting, Mounted, Unmounting or Failed.
The phase of a claim is Pending, Bound, Lost, or Terminating if its manifest was
removed. The phase of a PersistentVolume is Available, Bound, Released, or Failed if it
cannot be reclaimed. In JSON and YAML, complete is true if there were manifests and each
was valid at least once, since is the time when the phase began, and retryAt is the time
of the next attempt, unless the attempt waits for a change.

The exit status is 1 if no volume manager runs at --root-dir. Problems of volumes do
not change it.`,
		Example: `  trivet volume-manager status

  # The volumes that are not mounted.
  trivet volume-manager status -o json | jq '.volumes[] | select(.phase != "Mounted")'`,
	}
	root := rootDirFlag(cmd)
	out := outputFlag(cmd)
	cmd.RunE = func(*cobra.Command, []string) error {
		s, err := volumemanager.ReadStatus(context.Background(), *root)
		if err != nil {
			return err
		}
		return out.write(s, statusTables(s)...)
	}
	return cmd
}

// shownEvents is the maximum number of events in a table. The JSON output contains all events.
const shownEvents = 20

func statusTables(s volumemanager.Status) []table {
	return []table{
		newTable(
			s.Volumes,
			column[reconciler.VolumeStatus]{name: "POD", cell: func(v reconciler.VolumeStatus) string { return v.Pod }},
			column[reconciler.VolumeStatus]{name: "UID", wide: true, cell: func(v reconciler.VolumeStatus) string { return string(v.PodUID) }},
			column[reconciler.VolumeStatus]{name: "VOLUME", cell: func(v reconciler.VolumeStatus) string { return v.Volume }},
			column[reconciler.VolumeStatus]{name: "PERSISTENTVOLUME", wide: true, cell: func(v reconciler.VolumeStatus) string { return v.PersistentVolume }},
			column[reconciler.VolumeStatus]{name: "PLUGIN", cell: func(v reconciler.VolumeStatus) string { return v.Plugin }},
			column[reconciler.VolumeStatus]{name: "PHASE", cell: func(v reconciler.VolumeStatus) string { return string(v.Phase) }, color: func(v reconciler.VolumeStatus) color { return phaseColor(string(v.Phase)) }},
			column[reconciler.VolumeStatus]{name: "PATH", cell: func(v reconciler.VolumeStatus) string { return v.Path }},
			column[reconciler.VolumeStatus]{name: "MESSAGE", cell: currentMessage},
		),
		newTable(
			s.Claims,
			column[claim.ClaimStatus]{name: "CLAIM", cell: func(c claim.ClaimStatus) string { return c.Namespace + "/" + c.Name }},
			column[claim.ClaimStatus]{name: "PHASE", cell: func(c claim.ClaimStatus) string { return c.Phase }, color: func(c claim.ClaimStatus) color { return phaseColor(c.Phase) }},
			column[claim.ClaimStatus]{name: "VOLUME", cell: func(c claim.ClaimStatus) string { return c.PersistentVolume }},
			column[claim.ClaimStatus]{name: "CAPACITY", cell: func(c claim.ClaimStatus) string { return sizeCell(c.SizeBytes) }},
			column[claim.ClaimStatus]{name: "MESSAGE", cell: func(c claim.ClaimStatus) string { return c.Message }},
		),
		newTable(
			s.PersistentVolumes,
			column[claim.VolumeStatus]{name: "PERSISTENTVOLUME", cell: func(v claim.VolumeStatus) string { return v.Name }},
			column[claim.VolumeStatus]{name: "PHASE", cell: func(v claim.VolumeStatus) string { return v.Phase }, color: func(v claim.VolumeStatus) color { return phaseColor(v.Phase) }},
			column[claim.VolumeStatus]{name: "CLAIM", cell: func(v claim.VolumeStatus) string { return v.Claim }},
			column[claim.VolumeStatus]{name: "CLASS", cell: func(v claim.VolumeStatus) string { return v.StorageClass }},
			column[claim.VolumeStatus]{name: "RECLAIM", cell: func(v claim.VolumeStatus) string { return v.ReclaimPolicy }},
			column[claim.VolumeStatus]{name: "CAPACITY", cell: func(v claim.VolumeStatus) string { return sizeCell(v.SizeBytes) }},
			column[claim.VolumeStatus]{name: "MESSAGE", cell: func(v claim.VolumeStatus) string { return v.Message }},
		),
		newTable(
			s.Drivers,
			column[csi.DriverStatus]{name: "DRIVER", cell: func(d csi.DriverStatus) string { return d.Name }},
			column[csi.DriverStatus]{name: "SOCKET", cell: func(d csi.DriverStatus) string { return d.Socket }},
			column[csi.DriverStatus]{name: "ENDPOINT", wide: true, cell: func(d csi.DriverStatus) string { return d.Endpoint }},
			column[csi.DriverStatus]{name: "NODE", cell: func(d csi.DriverStatus) string { return d.NodeID }},
			column[csi.DriverStatus]{name: "MESSAGE", cell: func(d csi.DriverStatus) string { return d.Problem }},
		),
		newTable(
			s.Problems,
			column[manifest.Problem]{name: "FILE", cell: func(p manifest.Problem) string { return p.File }},
			column[manifest.Problem]{name: "OBJECT", cell: func(p manifest.Problem) string { return p.Object }},
			column[manifest.Problem]{name: "PROBLEM", cell: func(p manifest.Problem) string { return p.Message }},
		),
		newTable(
			s.Events[max(0, len(s.Events)-shownEvents):],
			column[event.Event]{name: "TIME", cell: func(e event.Event) string { return e.Time.Local().Format(time.DateTime) }},
			column[event.Event]{name: "OBJECT", cell: func(e event.Event) string { return e.Object }},
			column[event.Event]{name: "REASON", cell: func(e event.Event) string { return e.Reason }, color: eventColor},
			column[event.Event]{name: "COUNT", cell: func(e event.Event) string { return strconv.Itoa(e.Count) }},
			column[event.Event]{name: "MESSAGE", cell: func(e event.Event) string { return e.Message }},
		),
	}
}

// sizeCell returns the cell of a size; empty if it is unknown.
func sizeCell(bytes int64) string {
	if bytes == 0 {
		return ""
	}
	return volume.FormatSize(bytes)
}

// phaseColor returns the color of the phase of a volume or claim.
func phaseColor(phase string) color {
	switch {
	case slices.Contains([]string{string(state.Mounted), "Bound", "Available"}, phase):
		return green
	case slices.Contains([]string{string(state.Failed), "Lost"}, phase):
		return red
	}
	return yellow
}

func eventColor(e event.Event) color {
	if e.Warning {
		return yellow
	}
	return noColor
}

// currentMessage returns the message of a volume. During an operation, the text begins with the duration of the
// operation, because a driver may hang, and the message may be about an earlier attempt.
func currentMessage(v reconciler.VolumeStatus) string {
	idle := v.Phase == state.Pending || v.Phase == state.Mounted || v.Phase == state.Failed
	if idle || v.Since.IsZero() {
		return v.Message
	}
	took := "for " + time.Since(v.Since).Round(time.Second).String()
	if v.Message != "" {
		took += ", after: " + v.Message
	}
	return took
}
