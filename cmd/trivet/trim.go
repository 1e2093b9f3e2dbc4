package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/kubectl"
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
		path, err := driver.SocketPath(*endpoint)
		if err != nil {
			return fmt.Errorf("--endpoint: %w", err)
		}
		r.Volumes = args
		results, err := requestTrim(cmd.Context(), path, r)
		if err != nil {
			return err
		}
		return cmp.Or(out.write(results, trimTable(results)), trimProblem(results))
	}
	return cmd
}

// requestTrim requests the driver at a socket to trim volumes.
func requestTrim(ctx context.Context, socket string, r driver.TrimRequest) ([]driver.TrimResult, error) {
	conn, err := dialDriver(socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return driver.Trim(ctx, conn, r)
}

// dialDriver returns a connection to the driver at a socket.
func dialDriver(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
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
			*node, options = on, []string{id}
		}
		c, pods, err := access.pods(cmd.Context(), *node)
		if err != nil {
			return err
		}
		results, err := trimInPod(cmd.Context(), c, pods, options)
		if err != nil {
			return err
		}
		return cmp.Or(out.write(results, trimTable(results)), trimProblem(results))
	}
	return cmd
}

// volumeOfClaim returns the ID of the volume of a claim, and the node that has it.
func (a *clusterAccess) volumeOfClaim(ctx context.Context, claim string) (id, node string, err error) {
	namespace, err := a.claimNamespace()
	if err != nil {
		return "", "", err
	}
	c, r, err := a.report(ctx)
	if err != nil {
		return "", "", err
	}
	all, err := c.Volumes(ctx, r)
	if err != nil {
		return "", "", err
	}
	i := slices.IndexFunc(all, func(v kubectl.Volume) bool { return v.Claim == namespace+"/"+claim && v.ID != "" })
	switch {
	case i < 0:
		return "", "", cmp.Or(incompleteReport(r), fmt.Errorf("claim %s/%s has no volume of this driver: see `kubectl trivet volumes`", namespace, claim))
	case all[i].Node == "":
		return "", "", fmt.Errorf("claim %s/%s: its volume is on an export and cannot be trimmed: use mountOptions: [discard] in its StorageClass", namespace, claim)
	}
	return all[i].ID, all[i].Node, nil
}

// trimInPod runs `trivet trim` in the pod of a node's driver.
func trimInPod(ctx context.Context, c *kubectl.Cluster, pods []kube.Pod, options []string) (results []driver.TrimResult, err error) {
	for _, pod := range pods {
		text, err := c.Run(ctx, pod, append([]string{"trim", "--output=json"}, options...)...)
		if err != nil {
			return nil, err
		}
		var some []driver.TrimResult
		if err := json.Unmarshal(text, &some); err != nil {
			return nil, fmt.Errorf("reading the output of trivet trim in pod %s: %w", pod.Metadata.Name, err)
		}
		results = append(results, some...)
	}
	return results, nil
}
