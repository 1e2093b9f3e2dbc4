package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/driver"
)

// requestDriver sends a request to the driver at an endpoint.
func requestDriver[Request, Result any](ctx context.Context, endpoint string, r Request,
	send func(context.Context, grpc.ClientConnInterface, Request) ([]Result, error),
) ([]Result, error) {
	socket, err := driver.SocketPath(endpoint)
	if err != nil {
		return nil, fmt.Errorf("--endpoint: %w", err)
	}
	conn, err := dialDriver(socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return send(ctx, conn, r)
}

// dialDriver returns a connection to the driver at a socket.
func dialDriver(socket string) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
}

// volumeOfClaim returns the ID of the volume of a claim, and the node that has it. The node is empty if the volume is on an export.
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
	if i < 0 {
		return "", "", cmp.Or(incompleteReport(r), fmt.Errorf("claim %s/%s has no volume of this driver: see `kubectl trivet volumes`", namespace, claim))
	}
	return all[i].ID, all[i].Node, nil
}

// runInPods runs a command of trivet in pods of drivers, and returns the results that it prints.
func runInPods[Result any](ctx context.Context, c *kubectl.Cluster, pods []kube.Pod, args []string) (results []Result, err error) {
	for _, pod := range pods {
		text, err := c.Run(ctx, pod, append(args, "--output=json")...)
		if err != nil {
			return nil, err
		}
		var some []Result
		if err := json.Unmarshal(text, &some); err != nil {
			return nil, fmt.Errorf("reading the output of trivet %s in pod %s: %w", args[0], pod.Metadata.Name, err)
		}
		results = append(results, some...)
	}
	return results, nil
}
