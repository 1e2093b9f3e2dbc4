package main

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/volume"
)

func newOrphansCommand(access *clusterAccess) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "orphans",
		Short: "List volumes and snapshots without an object, and objects without a volume or snapshot",
		Long: `Lists volumes without a PersistentVolume, snapshots without a VolumeSnapshotContent,
PersistentVolumes without a volume, and VolumeSnapshotContents without a snapshot, each
with the command that removes it. Nothing is removed.

A pool that is not open is not examined. The exit status is 1 if a driver does not
report or a pool is not open, because there may then be more orphans.`,
		Example: `  kubectl trivet orphans

  # Delete an orphaned volume and its data. The sidecars delete it through the driver.
  kubectl trivet orphans --manifest ID | kubectl create -f -`,
	}
	var manifest string
	cmd.Flags().StringVar(&manifest, "manifest", "", "print only the manifest of an object whose creation deletes the orphaned volume or snapshot with this `ID`, and its data")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		c, r, err := access.report(cmd.Context())
		if err != nil {
			return err
		}
		orphans, err := c.Orphans(cmd.Context(), r)
		if err != nil {
			return err
		}
		if manifest != "" {
			return writeManifest(cmd, r.Driver, manifest, orphans)
		}
		if orphans == nil {
			orphans = []kubectl.Orphan{} // an empty list in JSON
			cmd.PrintErrln("No orphans found.")
		}
		return cmp.Or(out.write(orphans, orphanTable(orphans)), incompleteReport(r))
	}
	return cmd
}

func writeManifest(cmd *cobra.Command, driver, id string, orphans []kubectl.Orphan) error {
	i := slices.IndexFunc(orphans, func(o kubectl.Orphan) bool { return o.Name == id })
	if i < 0 {
		return fmt.Errorf("--manifest %q is not an orphan: run 'kubectl trivet orphans' for the list", id)
	}
	text, err := kubectl.Manifest(driver, orphans[i])
	if err != nil {
		return err
	}
	_, err = fmt.Fprint(cmd.OutOrStdout(), text)
	return err
}

func orphanTable(all []kubectl.Orphan) table {
	text := func(name string, wide bool, of func(kubectl.Orphan) string) column[kubectl.Orphan] {
		return column[kubectl.Orphan]{name: name, wide: wide, cell: func(o kubectl.Orphan) string { return cmp.Or(of(o), "-") }}
	}
	t := newTable(
		all,
		text("KIND", false, func(o kubectl.Orphan) string { return o.Kind }),
		text("NAME", false, func(o kubectl.Orphan) string { return o.Name }),
		text("NODE", true, func(o kubectl.Orphan) string { return o.Node }),
		text("POOL", true, func(o kubectl.Orphan) string { return o.Pool }),
		text("SIZE", false, func(o kubectl.Orphan) string { return volume.FormatSize(o.SizeBytes) }),
		text("REASON", false, func(o kubectl.Orphan) string { return o.Reason }),
		text("CLEAN UP", false, func(o kubectl.Orphan) string { return o.CleanUp }),
	)
	t.noHeader = len(all) == 0
	return t
}
