// Package transfer sends the content of snapshots and volumes between the drivers of nodes. The controller's driver signs a
// Ticket for each transfer, and passes it to the node of the new volume with the call that creates the volume (Offer). That
// node presents the ticket to the node of the source (Client), which verifies it and sends the content (Server). No data
// passes through the controller.
//
// The nodes connect to each other's forwarding port with TLS, and negotiate Protocol in place of HTTP/2. Such a
// connection never reaches the gRPC server. Both present the certificates that they have as servers: the client proves that
// it is the node in the ticket, so the ticket is useless to every other process.
//
// This package knows no kinds of volumes: backends read and write the content (backend.Transferrer).
package transfer
