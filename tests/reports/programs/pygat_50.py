# diegoantognini/pyGAT#50: an attention joins the features of all pairs of 10,242 nodes.
# resolved: another branch, in which two vectors are added by broadcasting.
# run: --gpu v100-32gb
# first: does-not-fit
# fix: broadcasting
# also: fragmentation
# not: micro-batch
import torch
from torch import nn
from torch.nn import functional as F


class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features, out_features, dropout=0.6, alpha=0.2, concat=True):
        super().__init__()
        self.dropout, self.alpha, self.concat, self.out_features = dropout, alpha, concat, out_features
        self.W = nn.Parameter(torch.empty(in_features, out_features))
        nn.init.xavier_uniform_(self.W, gain=1.414)
        self.a = nn.Parameter(torch.empty(2 * out_features, 1))
        nn.init.xavier_uniform_(self.a, gain=1.414)
        self.leakyrelu = nn.LeakyReLU(alpha)

    def forward(self, x, adj):
        h = torch.mm(x, self.W)
        e = self.leakyrelu(torch.matmul(self.prepare(h), self.a).squeeze(2))
        attention = torch.where(adj > 0, e, -9e15 * torch.ones_like(e))
        attention = F.dropout(F.softmax(attention, dim=1), self.dropout, training=self.training)
        h_prime = torch.matmul(attention, h)
        return F.elu(h_prime) if self.concat else h_prime

    def prepare(self, h):
        n = h.size(0)
        repeated_in_chunks = h.repeat_interleave(n, dim=0)
        repeated_alternating = h.repeat(n, 1)
        all_combinations = torch.cat([repeated_in_chunks, repeated_alternating], dim=1)  # <- cause
        return all_combinations.view(n, n, 2 * self.out_features)


class GAT(nn.Module):
    def __init__(self, features, hidden, classes, heads):
        super().__init__()
        self.attentions = nn.ModuleList([GraphAttentionLayer(features, hidden) for _ in range(heads)])
        self.out_att = GraphAttentionLayer(hidden * heads, classes, concat=False)

    def forward(self, x, adj):
        x = F.dropout(x, 0.6, training=self.training)
        x = torch.cat([att(x, adj) for att in self.attentions], dim=1)
        return F.log_softmax(F.elu(self.out_att(x, adj)), dim=1)


nodes = 10242
features = torch.rand(nodes, 300).cuda()
adj = (torch.rand(nodes, nodes) < 0.001).float().cuda()
labels = torch.randint(0, 7, (nodes,)).cuda()
idx_train = torch.arange(1400).cuda()

model = GAT(300, 8, 7, heads=8).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
for epoch in range(20):
    model.train()
    optimizer.zero_grad()
    output = model(features, adj)
    loss = F.nll_loss(output[idx_train], labels[idx_train])
    loss.backward()
    optimizer.step()
    print(epoch, loss.item())
