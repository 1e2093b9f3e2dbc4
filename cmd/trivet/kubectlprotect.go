package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/move"
)

// protectFlags are the flags of `kubectl trivet protect`.
type protectFlags struct {
	move.ProtectOptions
	stop, yes bool
	once      string
}

func newProtectCommand(access *clusterAccess) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "protect CLAIM --on NODE --every PERIOD",
		Short: "Keep copies of the volume of a claim on another node",
		Long: `Keeps copies of the volume of a PersistentVolumeClaim on another node. A CronJob in the
namespace of the drivers takes a snapshot in each period, and transfers what has changed
since the last one. If the node of the claim is lost, 'kubectl trivet recover' gives the
claim the newest copy.

The copies are asynchronous: what was written after the snapshot of the newest complete
copy is lost with the node. Without --on, --every and --stop, the command prints the
protection and its copies. If the claim is protected already, --on and --every change
the protection, and what is not named stays as it is.`,
		Example: `  kubectl trivet protect -n shop data-db-0 --on worker-2 --every 15m

  # Show the copies and the age of their data.
  kubectl trivet protect -n shop data-db-0

  kubectl trivet protect -n shop data-db-0 --stop`,
		Args: cobra.ExactArgs(1),
	}
	var f protectFlags
	flags := cmd.Flags()
	flags.StringVar(&f.To, "on", "", "`node` of the copies")
	must(cmd.RegisterFlagCompletionFunc("on", access.completeNodes))
	flags.StringVarP(&access.overrides.Context.Namespace, "namespace", "n", "", "`namespace` of the claim; default: that of the context")
	flags.DurationVar(&f.Every, "every", 0, "`period` of the copies: minutes that divide an hour, hours that divide a day, or 24h")
	flags.IntVar(&f.Kept, "keep", 0, "`number` of complete copies that are kept; default: that of the existing protection, or 2")
	flags.StringVar(&f.SnapshotClass, "snapshot-class", "", "VolumeSnapshotClass of the snapshots, by `name`; default: that of the existing protection, or the only one or the default one of the driver")
	flags.BoolVarP(&f.yes, "yes", "y", false, "do not ask before --stop deletes copies that may be the only data")
	flags.BoolVar(&f.stop, "stop", false, "end the protection, and delete its copies")
	flags.StringVar(&f.once, "once", "", "make one copy of the claim with this `UID`; the CronJob runs this")
	flags.BoolVar(&f.Owned, "owned", false, "with --once: Kubernetes deletes the copy after the claim was deleted")
	flags.DurationVar(&f.Timeout, "timeout", 5*time.Minute, "`duration` of the wait for the end of a copy that is being made")
	cmd.MarkFlagsMutuallyExclusive("every", "stop", "once")
	cmd.MarkFlagsMutuallyExclusive("on", "stop")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		ctx, stop := untilSignal()
		defer stop()
		return protectClaim(ctx, cmd.InOrStdin(), cmd.OutOrStdout(), access, f, args[0])
	}
	return cmd
}

// protectClaim shows, creates, changes or ends the protection of a claim, or makes one copy.
func protectClaim(ctx context.Context, in io.Reader, w io.Writer, access *clusterAccess, f protectFlags, claim string) (err error) {
	c, err := access.connect()
	if err != nil {
		return err
	}
	f.ClaimName, f.Transfers, f.Progress = claim, kinds.Transfer, func(format string, args ...any) { _, _ = fmt.Fprintf(w, format+"\n", args...) }
	if f.Namespace, err = access.claimNamespace(); err != nil {
		return err
	}
	switch {
	case f.once != "" && f.To != "":
		err = move.CopyOnce(ctx, c, f.ProtectOptions, f.once)
	case f.stop:
		err = stopProtection(ctx, in, c, f)
	case f.To != "" && f.Every != 0:
		err = startProtection(ctx, c, f)
	case f.To == "" && f.Every == 0 && f.once == "":
		err = showProtection(ctx, w, c, f)
	default:
		err = errors.New("give --on together with --every or --once, or none of them to see the protection")
	}
	return interrupted(ctx, err)
}

// startProtection creates or changes the protection of a claim.
func startProtection(ctx context.Context, c *kubectl.Cluster, f protectFlags) error {
	report, err := c.Report(ctx)
	if err != nil {
		return err
	}
	if err := move.Protect(ctx, c, report, f.ProtectOptions); err != nil {
		return err
	}
	f.Progress("Claim %s/%s is copied to node %s every %s.", f.Namespace, f.ClaimName, f.To, move.Period(f.Every))
	f.Progress("If its node is lost, what was written after the snapshot of the newest complete copy is lost.")
	f.Progress("To see the copies: kubectl trivet protect -n %s %s", f.Namespace, f.ClaimName)
	return nil
}

// stopProtection ends all protections of claims with a name. More than one exists if a claim was deleted and created again.
func stopProtection(ctx context.Context, in io.Reader, c *kubectl.Cluster, f protectFlags) error {
	all, err := protections(ctx, c, f)
	if err != nil {
		return err
	}
	for _, p := range all {
		reason, err := move.OnlyData(ctx, c, p, f.Options)
		if err != nil {
			return err
		}
		if reason != nil && !f.yes {
			f.Progress("The copies of claim %s may be its only data: %v. --stop deletes them.", p.Claim, reason)
			if err := confirm(in, f.Progress); err != nil {
				return err
			}
		}
		if err := move.StopProtection(ctx, c, p, f.Options); err != nil {
			return err
		}
		f.Progress("The protection of claim %s is ended, and its copies are deleted.", p.Claim)
	}
	return nil
}

// protections returns the protections of claims with a name. None is an error.
func protections(ctx context.Context, c *kubectl.Cluster, f protectFlags) ([]move.Protection, error) {
	all, err := move.Protections(ctx, c, f.Namespace, f.ClaimName)
	if err == nil && len(all) == 0 {
		err = fmt.Errorf("claim %s/%s is not protected: protect it with --on NODE --every PERIOD", f.Namespace, f.ClaimName)
	}
	return all, err
}

// showProtection prints the protections of claims with a name, and the copies.
func showProtection(ctx context.Context, w io.Writer, c *kubectl.Cluster, f protectFlags) error {
	all, err := protections(ctx, c, f)
	if err != nil {
		return err
	}
	for _, p := range all {
		f.Progress("Claim %s (UID %s) is copied to node %s every %s; %d copies are kept.", p.Claim, p.UID, p.Node, p.Every, p.Keep)
		f.Progress("Last run: %s. Last success: %s.", orNever(p.LastRun), orNever(p.LastSuccess))
	}
	report, err := c.Report(ctx)
	if err != nil {
		return err
	}
	copies, refused, err := move.Copies(ctx, c, report, f.Options)
	if err != nil {
		return err
	}
	for _, r := range refused {
		f.Progress("Not usable: %v.", r.Reason)
	}
	return writeTables(w, []table{copyTable(copies)}, false, hasColors(w))
}

func orNever(text string) string {
	if text == "" {
		return "never"
	}
	return text
}

func copyTable(all []move.Copy) table {
	return newTable(
		all,
		column[move.Copy]{name: "COPY", cell: func(c move.Copy) string { return c.Claim }},
		column[move.Copy]{name: "NODE", cell: func(c move.Copy) string { return c.Node }},
		column[move.Copy]{name: "DATA OF", cell: func(c move.Copy) string { return c.Snapshotted.UTC().Format(time.RFC3339) }},
		column[move.Copy]{name: "AGE", cell: func(c move.Copy) string { return move.Age(c.Snapshotted) }},
	)
}
