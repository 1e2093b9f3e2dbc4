package main

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/volume"
)

// errNotTrimmed makes the command exit with status 1. The output contains the problems.
var errNotTrimmed = errors.New("some volumes were not trimmed: see the problems above")

func newTrimCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "trim [VOLUME]...",
		GroupID: adminGroup,
		Short:   "Return the space of deleted files to the pools",
		Long: `Requests the driver of this node to discard the unused blocks of volumes, so that their
space returns to the pool, as fstrim does. It does so at the rate of the pool's
configuration, and returns when all volumes are trimmed.

The arguments are IDs of volumes ('trivet volumes'). Without arguments, all mounted
volumes are trimmed that have space to return: filesystems in thin images and in thin
pools. trimmedBytes is what the kernel has discarded; ext4 and btrfs do not discard
blocks again that are unused since an earlier trim.

The exit status is 1 if a volume was not trimmed.`,
		Example: `  # All volumes of a pool.
  trivet trim --pool default`,
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	var r driver.TrimRequest
	endpoint := endpointFlag(cmd)
	cmd.Flags().StringVar(&r.Pool, "pool", "", "trim only volumes of the pool with this `name`")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 && r.Pool != "" {
			return asUsageError(cmd, errors.New("give either volumes or --pool"))
		}
		r.Volumes = args
		results, err := requestDriver(cmd.Context(), *endpoint, r, driver.Trim)
		if err != nil {
			return err
		}
		return cmp.Or(out.write(results, trimTable(results)), trimProblem(results))
	}
	return cmd
}

func trimProblem(results []driver.TrimResult) error {
	if slices.ContainsFunc(results, func(r driver.TrimResult) bool { return r.Problem != "" }) {
		return errNotTrimmed
	}
	return nil
}

func trimTable(results []driver.TrimResult) table {
	return newTable(
		results,
		column[driver.TrimResult]{name: "POOL", cell: func(r driver.TrimResult) string { return cmp.Or(r.Pool, "-") }},
		column[driver.TrimResult]{name: "VOLUME", cell: func(r driver.TrimResult) string { return cmp.Or(r.Name, r.ID) }},
		column[driver.TrimResult]{name: "TRIMMED", cell: func(r driver.TrimResult) string { return volume.FormatSize(r.TrimmedBytes) }},
		column[driver.TrimResult]{name: "PROBLEM", cell: func(r driver.TrimResult) string { return cmp.Or(r.Problem, "-") }, color: func(r driver.TrimResult) color { return goodIf(r.Problem == "") }},
	)
}

func newClusterTrimCommand(access *clusterAccess) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "trim CLAIM | --node NODE [--pool POOL]",
		Short: "Return the space of deleted files to the pools",
		Long: `Runs 'trivet trim' in the pod of a node's driver: for the volume of a claim, or for all
volumes of a node or of one of its pools. It returns when all volumes are trimmed. A trim
continues if the command is interrupted.

The command needs the right to create pods/exec in the namespace of the drivers. The
exit status is 1 if a volume was not trimmed.`,
		Example: `  kubectl trivet trim data-web-0 -n shop
  kubectl trivet trim --node worker-1 --pool default`,
		Args: cobra.MaximumNArgs(1),
	}
	var pool string
	node := access.nodeFlag(cmd, "trim all volumes of this `node`")
	cmd.Flags().StringVar(&pool, "pool", "", "with --node: trim only volumes of the pool with this `name`")
	cmd.Flags().StringVarP(&access.overrides.Context.Namespace, "namespace", "n", "", "`namespace` of the claim; default: that of the context")
	out := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) == 0 && *node == "":
			return asUsageError(cmd, errors.New("name a claim, or a node with --node"))
		case len(args) > 0 && (*node != "" || pool != ""):
			return asUsageError(cmd, errors.New("give either a claim or --node"))
		}
		var options []string
		if pool != "" {
			options = []string{"--pool=" + pool}
		}
		if len(args) > 0 {
			id, on, err := access.volumeOfClaim(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if on == "" {
				return fmt.Errorf("claim %s: its volume is on an export and cannot be trimmed: use mountOptions: [discard] in its StorageClass", args[0])
			}
			*node, options = on, []string{id}
		}
		c, pods, err := access.pods(cmd.Context(), *node)
		if err != nil {
			return err
		}
		results, err := runInPods[driver.TrimResult](cmd.Context(), c, pods, append([]string{"trim"}, options...))
		if err != nil {
			return err
		}
		return cmp.Or(out.write(results, trimTable(results)), trimProblem(results))
	}
	return cmd
}
